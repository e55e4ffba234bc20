"""A cycle without drafting: what another drafter has proposed once, verified again and again."""

from bytejax.decoding.generate import Generation
from bytejax.drafters.base import Draft, Drafter
from bytejax.errors import InputError


class Replayed(Drafter):
    """Proposes one draft of another drafter in every cycle, after the root of the cycle. Made by `of`.

    Rows, masks, taps, draft stream and acceptance are the other's; no candidates are looked for and nothing is
    observed.
    """

    drafter: Drafter
    draft: Draft

    @classmethod
    def of(cls, drafter: Drafter, generation: Generation) -> "Replayed":
        """The draft that `drafter` would propose where `generation`, one of its own, stands.

        Raises InputError for a drafter whose cycles have several widths: no single one is its cycle.
        """
        if drafter.fallback() is not None:
            raise InputError("the drafter's cycles have several widths, and there is no one cycle to compare with")
        return cls(drafter, generation.proposal().replace(memory=None))

    @property
    def block_width(self):
        return self.drafter.block_width

    @property
    def drafts_first(self):
        return self.drafter.drafts_first

    @property
    def proposes_chains(self):
        return self.drafter.proposes_chains

    @property
    def rules(self):
        return self.drafter.rules

    @property
    def taps(self):
        return self.drafter.taps

    def target_adapter(self):
        return self.drafter.target_adapter()

    def init(self, target, prompt):
        return ()

    def propose(self, state, root, keys, warp):
        block = self.draft.block
        return self.draft if root is None else self.draft.replace(block=block.replace(ids=block.ids.at[:, 0].set(root)))

    def observe(self, state, target, outcome):
        return state

"""FF: independent positions."""

import dataclasses
from typing import ClassVar

from bytejax.circuits.cp import CP


@dataclasses.dataclass(frozen=True)
class FF(CP):
    """Fully factorised: q(x) = prod_i phi_i(x_i) (MtPC, Eq. FF), which is CP with rank 1; sums [..., 1, 1] are zero."""

    name: ClassVar[str] = "ff"
    rank: int = dataclasses.field(default=1, init=False)

"""The one error that means "the input is wrong", as opposed to "the program is wrong"."""


class InputError(ValueError):
    """Bad input from the user: one line that says what is wrong, where, and what would work.

    The command line prints it without a traceback and exits with status 2.
    """

"""The one exception for mistakes that a user can mend."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input or a broken precondition: what was found, what was expected, where, what to do.

    The command line prints it without a traceback and exits with code 2.
    """

    def __init__(self, found: str, *, expected: str = "", where: object = "", next: str = ""):
        lines = [found]
        lines += [f"  expected: {expected}"] if expected else []
        lines += [f"  in:       {where}"] if where else []
        lines += [f"  next:     {next}"] if next else []
        super().__init__("\n".join(lines))
        self.found, self.expected, self.where, self.next = found, expected, str(where), next

"""The one error type of the library's edge: input that its user can mend."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input, told in one line: what is wrong, where, the value found, and how to mend it.

    Example: `--gamma: 0 drafted tokens per block; give 1 or more`. Commands print the message to
    standard error and exit with code 2; programs catch it as a ValueError.
    """

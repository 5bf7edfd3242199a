# transformers is typed, but reading it (and torch behind it) takes pyright three times as long as the rest.
from typing import Any

def __getattr__(name: str) -> Any: ...

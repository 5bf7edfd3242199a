# transformers is typed, but pyright takes three times as long to read it, and torch behind it,
# as all other files.
from typing import Any

def __getattr__(name: str) -> Any: ...

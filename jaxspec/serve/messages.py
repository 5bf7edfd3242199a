"""Read the messages of a request, with the texts and images of their parts, within its limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from PIL.Image import Image

from jaxspec.data.images import StoredImage
from jaxspec.data.messages import DATA_URL, decoded_url
from jaxspec.errors import InputError, located
from jaxspec.serve.fields import check_keys, whole_number

LONGEST_TOKEN = 128
"""Maximum characters that are counted for a token, to refuse a long text before it is encoded."""


@dataclass(frozen=True)
class Limits:
    """Bound what one request may ask for.

    Attributes:
      model: Name of the model.
      images: Maximum images of a request.
      pixels: Maximum pixels of an image.
      tokens: Maximum tokens of a prompt.
      choices: Maximum answers to a request.
      folder: Directory whose images `file:` addresses name; None for none.
      body: Maximum bytes of a body, and of a file in the folder.
      races: Whether a request may ask for plain decoding.
      thinking: Whether the model thinks where a request does not say it, see `Request`.
      max_pixels: Maximum pixels to which an image is scaled; None for models that do not scale so.
      max_soft_tokens: Maximum tokens of an image where a request does not say it, see `Request`.
    """

    model: str
    images: int = 1
    pixels: int = 16_777_216
    tokens: int = 1024
    choices: int = 8
    folder: Path | None = None
    body: int = 32 * 2**20
    races: bool = False
    thinking: bool | None = None
    max_pixels: int | None = None
    max_soft_tokens: int | None = None


@dataclass
class Budget:
    """Count what is left of a request's images and characters."""

    limits: Limits
    images: int = 0
    letters: int = 0
    pixels: set[int | None] = field(default_factory=set)
    """What images say of their `max_pixels`."""

    def text(self, text: str, where: str) -> str:
        self.letters += len(text)
        if self.letters > self.limits.tokens * LONGEST_TOKEN:
            raise InputError(f"{where}: the prompt is far over {self.limits.tokens} tokens")
        return text

    def image(self, url: str, where: str) -> Image:
        self.images += 1
        if self.images > self.limits.images:
            raise InputError(f"{where}: more than {self.limits.images} images; give fewer")
        return _image(url, where, self.limits)

    def max_pixels(self) -> int | None:
        """Return the request's limit after resizing: the images' or the server's, if smaller."""
        if len(self.pixels) > 1:
            raise InputError("max_pixels: differs between images; give the same for all")
        limits = [*self.pixels, self.limits.max_pixels]
        return min((most for most in limits if most is not None), default=None)


ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


def read_message(message: Any, where: str, budget: Budget) -> dict[str, Any]:
    """Return a message in the form of `Request`; InputError for anything else."""
    if not isinstance(message, dict):
        raise InputError(f'{where}: not an object; give {{"role": ..., "content": ...}}')
    # Earlier reasoning is read by no later turn.
    keys = ("role", "content", "name", "reasoning_content")
    kind = ("type",) if message.get("type") in ("text", "message") else ()
    check_keys(message, (*keys, *kind), where)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise InputError(f"{where}.role: {str(role)[:60]!r}; give one of {', '.join(ROLES)}")
    if isinstance(content, str):
        return {"role": ROLES[role], "content": budget.text(content, f"{where}.content")}
    if not isinstance(content, list) or not content:
        raise InputError(f"{where}.content: give a string, or a list of parts")
    parts = [_part(part, f"{where}.content[{i}]", budget) for i, part in enumerate(content)]
    if role != "user" and any(part["type"] == "image" for part in parts):
        raise InputError(f"{where}.content: an image of the {role}; only users show images")
    return {"role": ROLES[role], "content": parts}


def _part(part: Any, where: str, budget: Budget) -> dict[str, Any]:
    """Return a part of a message, a text or an image; InputError for anything else."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        check_keys(part, ("type", "text"), where)
        return {"type": "text", "text": budget.text(part["text"], where)}
    if kind == "image_url":
        check_keys(part, ("type", "image_url", "max_pixels"), where)
        with located(where):
            budget.pixels.add(whole_number(part, "max_pixels", None))
        image = part.get("image_url")
        image = {"url": image} if isinstance(image, str) else image
        if isinstance(image, dict) and isinstance(image.get("url"), str):
            check_keys(image, ("url", "detail"), f"{where}.image_url")
            return {"type": "image", "image": budget.image(image["url"], f"{where}.image_url")}
    raise InputError(f"{where}: give a part of type text or image_url")


def _image(url: str, where: str, limits: Limits) -> Image:
    """Return the image of a data URL, or of a file below the server's directory."""
    if DATA_URL.match(url):
        with located(where):
            content = decoded_url(url).content
    elif url.startswith("file:") and limits.folder is not None:
        content = _read_below(limits.folder, url.removeprefix("file:"), limits.body, where)
    else:
        mend = " or a file: address" if limits.folder else ""
        raise InputError(
            f"{where}: no address is fetched; give a data URL, as data:image/png;base64,...{mend}"
        )
    return StoredImage(content, where).load(limits.pixels)


def _read_below(folder: Path, name: str, most: int, where: str) -> bytes:
    """Return a file below the directory; InputError for any other, without telling why.

    The name may be percent-encoded. A file whose own name has such signs comes first.
    """
    content = None
    for spelling in (name, unquote(name)):
        try:
            root = folder.resolve()
            path = (root / spelling.lstrip("/")).resolve()
            if path.is_relative_to(root) and path.is_file():
                with path.open("rb") as file:
                    content = file.read(most + 1)
                break
        except (OSError, ValueError, RuntimeError):  # the last: a loop of links, before 3.13
            pass
    if content is None:
        raise InputError(f"{where}: no such file in the server's directory of images")
    if len(content) > most:
        raise InputError(f"{where}: a file of over {most} bytes; name a smaller one")
    return content

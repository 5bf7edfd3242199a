"""Name licences as the hub does: an id of its list, or a name and a link."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.locating import model_name, published_name
from jaxspec.errors import InputError

LIST = "https://huggingface.co/docs/hub/repositories-licenses"
_IDS = """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0
    bigcode-openrail-m afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause
    bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0
    cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0
    cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1
    eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc h-research
    intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
    openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr
    deepfloyd-if-license fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2
    llama3.3 llama4 gemma
    """
IDS = frozenset(_IDS.split())
"""The hub's ids of licences."""
_NAMED = re.compile(r"([\w.-]+)=(https?://\S+)")


@dataclass(frozen=True)
class Licence:
    """Hold a licence as the hub's cards name it.

    Fields:
      name: Id of the hub's list, or, with a link, a name of its own.
      link: Address of its text; "" for one of the list.
    """

    name: str
    link: str = ""

    @classmethod
    def parse(cls, text: str) -> Licence:
        """Read an id of the hub's list, or NAME=LINK.

        Raises InputError for anything else.
        """
        if match := _NAMED.fullmatch(text):
            return cls(match[1].lower(), match[2])
        if text.lower() in IDS:
            return cls(text.lower())
        near = get_close_matches(text.lower(), IDS, 1)
        advice = f"did you mean {near[0]!r}?" if near else "give one, or NAME=LINK of its text"
        raise InputError(f"licence {text!r}: not in the hub's list ({LIST}); {advice}")

    @property
    def front(self) -> dict[str, str]:
        """Return its entries of a card's front matter."""
        if not self.link:
            return {"license": self.name}
        return {"license": "other", "license_name": self.name, "license_link": self.link}

    def __str__(self) -> str:
        return f"[{self.name}]({self.link})" if self.link else self.name


def licence_of(source: Path) -> Licence | None:
    """Return the licence that the front matter of a directory's README.md names, if any.

    One that is not in the hub's list needs a link; a file's name is one of the hub's repository.
    """
    from huggingface_hub import metadata_load

    card = source / "README.md"
    try:
        front: dict[str, Any] = (metadata_load(card) or {}) if card.is_file() else {}
    except Exception:  # whatever a stranger's YAML holds
        return None
    licence, name, link = (front.get(key) for key in ("license", "license_name", "license_link"))
    if isinstance(licence, list) and len(licence) == 1:  # the hub takes a list, too
        (licence,) = licence
    if isinstance(licence, str) and licence in IDS:
        return Licence(licence)
    if licence != "other" or not (isinstance(name, str) and isinstance(link, str)):
        return None
    if "://" not in link:
        repository = published_name(model_name(source))
        link = f"https://huggingface.co/{repository}/blob/main/{link}" if repository else ""
    return Licence(name, link) if link else None

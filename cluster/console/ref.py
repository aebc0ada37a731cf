"""How a person names an adapter's version on the command line: `legal`, `legal@4` or `legal@canary`."""

import re
from dataclasses import dataclass

from cluster.console.errors import Refused, WrongUsage
from registry.types import LIVE_ALIAS, AdapterRecord, VersionRecord, is_adapter_name


@dataclass(frozen=True)
class AdapterRef:
    """An adapter's name and what follows the `@`: a version's number, an alias, or nothing."""

    name: str
    selector: str | None = None

    @property
    def number(self) -> int | None:
        return int(self.selector) if self.selector and re.fullmatch(r"[1-9][0-9]*", self.selector) else None

    def __str__(self) -> str:
        return self.name if self.selector is None else f"{self.name}@{self.selector}"


def parse_ref(text: str) -> AdapterRef:
    """Raise WrongUsage unless `text` is NAME, NAME@N or NAME@ALIAS."""
    name, at, selector = text.partition("@")
    check_name(name)
    if at and not re.fullmatch(r"[1-9][0-9]*|[a-z][a-z0-9_-]*", selector):
        raise WrongUsage(f"{text!r} is not NAME@N: a version is a number from 1, an alias a lower-case word")
    return AdapterRef(name, selector if at else None)


def check_name(name: str) -> str:
    if not is_adapter_name(name):
        raise WrongUsage(
            f"{name!r} is not an adapter's name: 1 to 64 of A-Z a-z 0-9 . _ -, a letter or digit at each end"
        )
    return name


def find_version(adapter: AdapterRecord, ref: AdapterRef) -> VersionRecord:
    """The version that `ref` means; without a selector, the live one. Raises Refused when there is none."""
    selector = ref.selector or LIVE_ALIAS
    number = ref.number if ref.number is not None else adapter.aliases.get(selector)
    found = adapter.version(number) if number is not None else None
    if found is None:
        raise Refused(f"{adapter.name} has no {_wanted(ref)}", code="adapter_not_found", hint=_what_it_has(adapter))
    return found


def _wanted(ref: AdapterRef) -> str:
    return f"version {ref.number}" if ref.number is not None else f"alias {ref.selector or LIVE_ALIAS}"


def _what_it_has(adapter: AdapterRecord) -> str:
    numbers = ", ".join(str(version.number) for version in adapter.versions) or "none"
    aliases = ", ".join(f"{alias} -> {number}" for alias, number in sorted(adapter.aliases.items())) or "none"
    return f"versions: {numbers}; aliases: {aliases}"

"""What `longspark check` and `longspark verify` print: sections of findings, as text or as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

_MARKS = {True: ("ok", "\x1b[32m"), False: ("FAIL", "\x1b[31m"), None: ("-", "")}
_RESET = "\x1b[0m"


@dataclass(frozen=True)
class Finding:
    """One line of a report.

    Attributes:
        name: what was looked at.
        passed: True or False for a check, None for plain information.
        figure: the number or fact that decided it.
        details: further lines, each a reason or a hint.
    """

    name: str
    passed: bool | None
    figure: str
    details: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """The finding as JSON shows it."""
        return {
            "name": self.name,
            "passed": self.passed,
            "figure": self.figure,
            "details": list(self.details),
        }


@dataclass
class Report:
    """Sections of findings, in order; it passes when no finding failed."""

    sections: dict[str, list[Finding]] = field(default_factory=dict)

    def add(self, section: str, *findings: Finding) -> None:
        """Append findings to a section."""
        self.sections.setdefault(section, []).extend(findings)

    @property
    def passed(self) -> bool:
        """No finding failed."""
        return all(f.passed is not False for findings in self.sections.values() for f in findings)

    @property
    def exit_code(self) -> int:
        """0 when it passed, else 1."""
        return 0 if self.passed else 1

    def text(self, colour: bool = False) -> str:
        """The report for a reader."""
        lines = []
        for section, findings in self.sections.items():
            lines.append(section)
            width = max((len(f.name) for f in findings), default=0)
            for finding in findings:
                mark, paint = _MARKS[finding.passed]
                padded = f"{mark:<4}"
                if colour and paint:
                    padded = f"{paint}{padded}{_RESET}"
                lines.append(f"  {padded}  {finding.name:<{width}}  {finding.figure}".rstrip())
                for detail in finding.details:
                    first, *rest = detail.splitlines()
                    lines += [f"        - {first}", *(f"          {line}" for line in rest)]
        lines.append("passed" if self.passed else "FAILED")
        return "\n".join(lines)

    def as_json(self) -> str:
        """The report for a program: {"passed": bool, "sections": {title: [finding, ...]}}."""
        sections = {
            title: [finding.as_dict() for finding in findings]
            for title, findings in self.sections.items()
        }
        return json.dumps({"passed": self.passed, "sections": sections}, indent=2)

    def print(self, as_json: bool, stream: TextIO | None = None) -> None:
        """Write the report; in colour on a terminal only, and not where NO_COLOR is set."""
        stream = stream or sys.stdout
        colour = stream.isatty() and "NO_COLOR" not in os.environ
        stream.write((self.as_json() if as_json else self.text(colour)) + "\n")
        stream.flush()

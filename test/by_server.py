"""How pytest-xdist shares the tests out."""

from __future__ import annotations

from pathlib import Path

from sharing import SHARING
from xdist.scheduler import LoadScopeScheduling


class ByServer(LoadScopeScheduling):
    """`--dist loadfile`, with the files that share servers as one.

    Not `--dist loadgroup`: xdist 3.8 does not see the groups under pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.split("::", 1)[0])
        shares = path.parent.name == "serving" and path.stem.removeprefix("test_") in SHARING
        return "sharing" if shares else path.as_posix()

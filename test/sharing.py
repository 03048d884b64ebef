"""Which test files share servers."""

from __future__ import annotations

# Starting a server takes longer than most tests that talk to it. So these files run one after the
# other in one process, in an order in which a server that several of them use is started once: a
# pool keeps two alive, of which most want the identity tests' server and its plain twin.
SHARING = (
    "identity", "verify_widths", "lifecycle", "openai_api", "bench", "verify", "hostile_requests",
    "snapshots", "parity", "refusals", "observability", "weights",
)  # fmt: skip

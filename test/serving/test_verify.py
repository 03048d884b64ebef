"""`longspark verify` against real servers; that each of its checks can fail is shown on a fake one
in test/unit/test_cli_verify.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from longspark_sglang.cli import main
from longspark_sglang.client import ServerClient
from longspark_sglang.report import Report
from longspark_sglang.verify import PROMPTS, verify

from serving.server import ServerPool
from serving.test_identity import CHECKED, CHUNKED

OPTIONS = {"extra_args": CHUNKED, "env": CHECKED}
# One short, one with identifiers to copy, one longer than the drafter's window.
SOME = [PROMPTS[0], PROMPTS[2], PROMPTS[5]]


def figures(report: Report) -> dict[str, str]:
    return {f.name: f.figure for findings in report.sections.values() for f in findings}


def test_a_plain_server_is_told_apart_and_serves_as_reference(
    servers: ServerPool,
    tiny_target: Path,
    tiny_drafter: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = servers.get(tiny_target, extra_args=CHUNKED)
    assert main(["verify", plain.url]) == 1
    assert "--speculative-algorithm LONGSPARK" in capsys.readouterr().out

    server = servers.get(tiny_target, tiny_drafter, **OPTIONS)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(SOME[:2]))
    arguments = ["--prompts", str(prompts), "--tokens", "16", "--json"]
    assert main(["verify", server.url, "--reference", plain.url, *arguments]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["passed"] is True
    assert content["sections"]["output"][0]["figure"] == "2 of 2 answers of 16 tokens identical"


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_longspark_server_passes(
    servers: ServerPool, tiny_target: Path, tiny_drafter: Path, page_size: int
) -> None:
    server = servers.get(tiny_target, tiny_drafter, page_size=page_size, **OPTIONS)
    report = verify(ServerClient(server.url), SOME, tokens=32)
    assert report.passed, report.text()
    seen = figures(report)
    assert seen["greedy parity"] == "3 of 3 answers of 32 tokens identical"
    assert seen["cold = warm prefix"].startswith("6 pairs, ")
    # The tiny pair has real acceptance, and some rejection too.
    assert 1.5 < float(seen["accept length"].split()[0]) < 8
    assert int(seen["stop strings and tokens"].split()[0]) >= 6
    # Float32 on both sides: the log-probabilities are those of plain decoding.
    assert float(seen["log-probabilities"].split()[-2]) < 1e-4
    assert server.alive

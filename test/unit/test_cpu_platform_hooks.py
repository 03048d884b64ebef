"""The CPU platform inside SGLang: entry points, hooks in force, defaults of the server arguments.

SGLang patches the process it lives in, so each test that loads plugins does so in one of its own.
"""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import longspark_cpu_platform
import pytest
from longspark_cpu_platform import hooks
from longspark_cpu_platform.platform import LongSparkCpuPlatform

PROJECT = Path(longspark_cpu_platform.__file__).parents[1] / "pyproject.toml"


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter without any GPU in sight."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_entry_points_lead_to_functions_of_the_package():
    points = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]
    assert set(points) == {"sglang.srt.platforms", "sglang.srt.plugins"}
    for group in points.values():
        assert list(group) == ["longspark_cpu"]
        for target in group.values():
            assert callable(pkgutil.resolve_name(target))


def test_only_active_without_cuda(monkeypatch):
    monkeypatch.setattr(longspark_cpu_platform, "_has_cuda", lambda: False)
    path = longspark_cpu_platform.activate()
    assert path is not None and pkgutil.resolve_name(path) is LongSparkCpuPlatform
    monkeypatch.setattr(longspark_cpu_platform, "_has_cuda", lambda: True)
    monkeypatch.setattr(hooks, "install", lambda: pytest.fail("hooks on a CUDA machine"))
    assert longspark_cpu_platform.activate() is None
    longspark_cpu_platform.register()


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: hook.target)
def test_every_target_exists_and_has_a_stand_in(hook):
    assert callable(pkgutil.resolve_name(hook.target))
    assert callable(pkgutil.resolve_name(f"longspark_cpu_platform.{hook.ours}"))
    assert hook.why


@pytest.mark.parametrize("target", hooks.GAPS)
def test_every_gap_is_named_by_sglang(target):
    home, name = target.rsplit(".", 1)
    assert name in vars(pkgutil.resolve_name(home))
    assert callable(pkgutil.resolve_name(f"longspark_cpu_platform.{hooks.GAPS[target]}"))


RESOLVE = """
from sglang.srt.plugins import load_plugins
load_plugins()
from longspark_cpu_platform import hooks
hooks.assert_applied()
from sglang.srt.speculative import dflash_utils, eagle_utils
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.server_args import prepare_server_args
hooks.assert_applied()
import sys
args = prepare_server_args(sys.argv[1:] if len(sys.argv) > 1 else {argv!r})
args.resolve_once()
view = resolved_view(args)
print("RESULT", view.device, view.attention_backend,
      view.sampling_backend, view.sleep_on_idle, view.speculative_num_draft_tokens,
      view.disable_radix_cache, dflash_utils.is_dflash_sampling_verify_available(),
      eagle_utils.top_k_renorm_prob.__module__)
"""


def test_defaults_need_no_flag(tiny_target, tmp_path):
    """Device, backends and DSPARK's device check, from a model path alone."""
    from baseline_drafts import make_dspark

    argv = ["--model-path", str(tiny_target), "--speculative-algorithm", "DSPARK"]
    argv += ["--speculative-draft-model-path", str(make_dspark(tmp_path, tiny_target))]
    argv += ["--enable-deterministic-inference"]
    done = run(RESOLVE.format(argv=argv))
    assert "RESULT" in done.stdout, done.stderr
    assert done.stdout.split("RESULT ")[1].split() == [
        *("cpu", "torch_native", "pytorch", "True", "8", "False", "True"),
        "longspark_cpu_platform.filters",
    ]


def test_tree_algorithms_are_refused(tiny_target):
    argv = ["--model-path", str(tiny_target), "--speculative-algorithm", "NGRAM"]
    argv += ["--speculative-num-draft-tokens", "8"]
    done = run(RESOLVE.format(argv=argv))
    assert done.returncode != 0
    assert "NGRAM verifies trees of drafts" in done.stderr


def test_missing_hooks_are_an_error_not_a_log_line(tiny_target):
    argv = ["--model-path", str(tiny_target)]
    # The platform is on the list of plugins to load, its hooks are not: a second entry point of the
    # same name cannot be told apart, so they are taken away after loading.
    code = RESOLVE.replace(
        "hooks.assert_applied()\n",
        "hooks.HookRegistry._patched.discard('torch.Tensor.record_stream')\n",
    )
    done = run(code.format(argv=argv))
    assert done.returncode != 0
    assert "torch.Tensor.record_stream (raises for a CPU tensor" in done.stderr
    assert "SGLANG_PLUGINS" in done.stderr

"""The seams to SGLang: every touched name exists, the algorithm has SGLang's whole interface, each
refusal names its flag, and a plugin that cannot load says so instead of vanishing.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt
from longspark_sglang.config import LongSparkConfig
from longspark_sglang.serving import compat, hooks, plugin
from longspark_sglang.serving.algorithm import LongSparkAlgorithm
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative import spec_registry
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

DOCS = Path(__file__).parents[2] / "docs/compatibility.md"
SRT = Path(sglang.srt.__file__).parent if sglang.srt.__file__ else Path(sglang.srt.__path__[0])


@pytest.fixture
def algorithm() -> LongSparkAlgorithm:
    return LongSparkAlgorithm("LONGSPARK", lambda args: object, supports_overlap=True)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An empty registry of algorithms and of hooks, so that `register` can be tried in here."""
    algorithms: dict[str, Any] = {}
    monkeypatch.setattr(spec_registry, "_REGISTRY", algorithms)
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.delenv("LONGSPARK_DISABLE", raising=False)
    return algorithms


# -- touched names ---------------------------------------------------------------------------------


def test_every_touched_name_is_there() -> None:
    assert compat.missing_symbols() == []
    assert compat.installed_sglang() in compat.TESTED_SGLANG


def test_every_moved_name_is_reported_with_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = "sglang.srt.managers.utils"
    wrong = (
        compat.Symbol("sglang.srt.no_such_module", "name", "call"),
        compat.Symbol(utils, "GenerationBatchResult.no_such_attribute", "field"),
        compat.Symbol(utils, "GenerationBatchResult", "call", ("accept_lens", "colour", "shape")),
    )
    monkeypatch.setattr(compat, "SYMBOLS", wrong)
    problems = compat.environment_problems()
    assert len(problems) == 3
    assert problems[0].startswith("sglang.srt.no_such_module.name is gone")
    assert problems[1].startswith(f"{utils}.GenerationBatchResult.no_such_attribute is gone")
    assert problems[2] == f"{utils}.GenerationBatchResult has no parameter colour, shape"
    # With another release the release is the first thing to change.
    monkeypatch.setattr(compat, "installed_sglang", lambda: "0.6.0")
    assert compat.environment_problems()[0] == (
        "sglang 0.6.0 is not a tested release; install sglang==0.5.23"
    )
    monkeypatch.setattr(compat, "installed_sglang", lambda: None)
    assert compat.environment_problems() == [
        "sglang is not installed: pip install 'longspark-sglang[sglang]'"
    ]


def test_symbols_are_listed_once() -> None:
    names = [(symbol.module, symbol.path) for symbol in compat.SYMBOLS]
    assert len(set(names)) == len(names)
    assert {symbol.use for symbol in compat.SYMBOLS} <= {"call", "override", "hook", "field"}


def test_every_imported_name_is_listed() -> None:
    """A name that the serving package imports from SGLang can move, so the table has it."""
    listed = {f"{symbol.module}.{part}" for symbol in compat.SYMBOLS for part in _stems(symbol)}
    folder = Path(compat.__file__).parent
    imported = {
        f"{node.module}.{alias.name}"
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.")
        for alias in node.names
    }
    assert len(imported) > 20
    assert imported - listed == set()


def _stems(symbol: compat.Symbol) -> list[str]:
    """The symbol's path and each path it goes through: a method's entry covers its class."""
    parts = symbol.path.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def test_overridden_methods_are_listed_and_keep_their_parameters() -> None:
    """What we override must exist in the base class with the same parameters."""
    for symbol in compat.SYMBOLS:
        if symbol.use != "override":
            continue
        base_name, method = symbol.path.split(".")
        base = getattr(pkgutil.resolve_name(symbol.module), base_name)
        theirs = list(inspect.signature(getattr(base, method)).parameters)
        for ours in _subclasses_of_ours(base):
            if method in vars(ours):
                assert list(inspect.signature(getattr(ours, method)).parameters) == [
                    ("args" if name == "server_args" else name) for name in theirs
                ]
                break
        else:
            raise AssertionError(f"{symbol.path} is listed as override, but nothing overrides it")


def _subclasses_of_ours(base: type) -> list[type]:
    from longspark_sglang.serving.worker import LongSparkWorker

    return [cls for cls in (LongSparkAlgorithm, LongSparkWorker) if issubclass(cls, base)]


# -- hooks -----------------------------------------------------------------------------------------


def test_hooks_and_symbol_table_agree() -> None:
    listed = {f"{s.module}.{s.path}" for s in compat.SYMBOLS if s.use == "hook"}
    assert listed == set(hooks.HOOKS)


@pytest.mark.parametrize("target", hooks.HOOKS)
def test_a_hook_takes_what_its_target_takes(target: str) -> None:
    theirs = inspect.signature(pkgutil.resolve_name(target))
    ours = inspect.signature(hooks.HOOKS[target])
    count = len(theirs.parameters)
    # Called with as many positional arguments as the target takes, after the original.
    ours.bind(*range(count + 1))
    if not any(p.kind is p.VAR_POSITIONAL for p in ours.parameters.values()):
        assert len(ours.parameters) == count + 1


def test_hooks_that_were_not_applied_are_named(registry: dict[str, Any]) -> None:
    target = next(iter(hooks.HOOKS))
    HookRegistry._patched.update(set(hooks.HOOKS) - {target})
    with pytest.raises(RuntimeError, match=f"hooks were not applied.*{re.escape(target)}$"):
        hooks.assert_applied()
    HookRegistry._patched.add(target)
    hooks.assert_applied()


# -- the algorithm's interface ---------------------------------------------------------------------

# What SGLang's enum has and an algorithm needs no answer to: constructors of the enum itself.
NO_METHODS_OF_AN_ALGORITHM = {"register", "from_string"}


def interface() -> dict[str, Any]:
    """Public methods of SGLang's enum of algorithms; callers use them on ours alike."""
    return {
        name: value
        for name, value in vars(SpeculativeAlgorithm).items()
        if not name.startswith("_")
        and name not in NO_METHODS_OF_AN_ALGORITHM
        and inspect.isfunction(value)
    }


def test_the_interface_is_not_empty() -> None:
    assert issubclass(SpeculativeAlgorithm, Enum)
    assert {"is_eagle", "create_future_map", "need_topk", "create_worker"} <= set(interface())


def test_the_algorithm_has_every_method_with_its_parameters(
    algorithm: LongSparkAlgorithm,
) -> None:
    for name, theirs in interface().items():
        ours = getattr(algorithm, name, None)
        assert callable(ours), f"LongSparkAlgorithm lacks {name}"
        wanted = list(inspect.signature(theirs).parameters.values())[1:]
        have = list(inspect.signature(ours).parameters.values())
        assert len(have) == len(wanted), name
        for mine, his in zip(have, wanted, strict=True):
            assert (mine.default is mine.empty) == (his.default is his.empty), (name, mine)


def test_the_base_class_lacks_what_we_add() -> None:
    """When SGLang adds one of these, ours may go."""
    for name in compat.ALGORITHM_ADDITIONS:
        assert not hasattr(spec_registry.CustomSpecAlgo, name)
        assert name in vars(LongSparkAlgorithm)


def test_every_predicate_has_a_decided_answer(algorithm: LongSparkAlgorithm) -> None:
    """A predicate that a new SGLang adds must be decided here, not inherited unseen."""
    true = {
        "is_some",
        "is_speculative",
        "supports_mixed_chunk",
        "supports_grammar_overlap",
    }
    false = {
        "is_none",
        "is_eagle",
        "is_eagle3",
        "is_frozen_kv_mtp",
        "is_dflash",
        "is_uno",
        "is_dspark",
        "is_dflash_family",
        "is_standalone",
        "is_ngram",
        "supports_target_verify_for_draft",
        "supports_prefill_shared_read_done",
        "supports_ragged_verify",
        "has_draft_kv",
        "carries_draft_hidden_states",
        "need_topk",
    }
    predicates = {
        name
        for name, method in interface().items()
        if len(inspect.signature(method).parameters) == 1
    } - {"get_platform_worker_cls"}
    assert predicates == true | false
    answers = {name: getattr(algorithm, name)() for name in predicates}
    assert {name for name, answer in answers.items() if answer is True} == true
    assert {name for name, answer in answers.items() if answer is False} == false
    assert algorithm.get_platform_worker_cls() is None
    assert algorithm.build_disagg_draft_input(None, None, None) is None
    assert algorithm.get_num_tokens_per_req_for_target_verify(8, False) == 8
    # Overlap is decided by an attribute of the same name as the registry's argument.
    assert algorithm.supports_overlap is True and algorithm.name == "LONGSPARK"


def test_whatever_sglang_asks_of_an_algorithm_is_there(algorithm: LongSparkAlgorithm) -> None:
    """Every attribute that SGLang's own sources read of a `spec_algorithm`."""
    asked: dict[str, str] = {}
    for path in SRT.rglob("*.py"):
        source = path.read_text(encoding="utf-8", errors="replace")
        for name in re.findall(r"\bspec(?:ulative)?_algo(?:rithm)?\s*\.\s*([a-z_]+)\s*\(", source):
            asked.setdefault(name, str(path.relative_to(SRT)))
    assert "create_future_map" in asked and len(asked) > 10
    # String methods: `speculative_algorithm` is also the name of the flag's text.
    missing = {
        name: where
        for name, where in asked.items()
        if not hasattr(algorithm, name) and not hasattr("", name)
    }
    assert missing == {}


def test_the_future_map_is_sglangs(algorithm: LongSparkAlgorithm) -> None:
    pool = SimpleNamespace(req_to_token=SimpleNamespace(shape=(5, 64)), size=4)
    theirs = SpeculativeAlgorithm.DFLASH.create_future_map("cpu", pool)
    ours = algorithm.create_future_map("cpu", pool)
    assert type(ours) is type(theirs)
    assert set(vars(theirs)) - set(vars(ours)) == set()


def test_arguments_are_filled_in_from_the_drafter(
    algorithm: LongSparkAlgorithm, tiny_drafter: Path
) -> None:
    args = SimpleNamespace(
        speculative_draft_model_path=str(tiny_drafter),
        speculative_num_draft_tokens=None,
        max_running_requests=None,
    )
    algorithm.handle_server_args(args)
    assert args.speculative_num_draft_tokens == 8
    assert (args.speculative_num_steps, args.speculative_eagle_topk) == (1, 1)
    assert args.max_running_requests == 48
    args.speculative_num_draft_tokens, args.max_running_requests = 5, 3
    algorithm.handle_server_args(args)
    assert (args.speculative_num_draft_tokens, args.max_running_requests) == (5, 3)


# -- refusals --------------------------------------------------------------------------------------

# (field of ServerArgs, refused value, a value that is served, flag to change)
REFUSED: list[tuple[str, Any, Any, str]] = [
    ("speculative_draft_model_path", None, "a/drafter", "--speculative-draft-model-path"),
    ("pp_size", 2, 1, "--pp-size"),
    ("enable_dp_attention", True, False, "DP attention"),
    ("attn_cp_size", 2, 1, "size 1"),
    ("dcp_size", 2, 1, "size 1"),
    ("disaggregation_mode", "decode", "null", "--disaggregation-mode"),
    ("kv_cache_dtype", "fp8_e4m3", "auto", "--kv-cache-dtype"),
    ("speculative_eagle_topk", 4, 1, "--speculative-eagle-topk"),
    ("speculative_num_steps", 5, 1, "--speculative-num-steps"),
    ("speculative_accept_threshold_single", 0.5, 1.0, "--speculative-accept-threshold-single"),
    ("speculative_accept_threshold_acc", 0.9, 1.0, "--speculative-accept-threshold-acc"),
    ("speculative_adaptive", True, False, "--speculative-adaptive"),
    ("enable_unified_memory", True, False, "--enable-unified-memory"),
    ("enable_two_batch_overlap", True, False, "--enable-two-batch-overlap"),
    ("enable_pdmux", True, False, "--enable-pdmux"),
    ("enable_lora", True, False, "--enable-lora"),
    ("lora_paths", ["a=b"], [], "--lora-paths"),
    ("device", "xpu", "cuda:0", "cuda or cpu"),
]


def served(**changes: Any) -> SimpleNamespace:
    good = {field: value for field, _, value, _ in REFUSED}
    return SimpleNamespace(**{**good, **changes})


def test_plain_arguments_are_served() -> None:
    assert compat.server_refusals(served()) == []
    # Fields that an SGLang release lacks count as unset.
    assert compat.server_refusals(SimpleNamespace(speculative_draft_model_path="x")) == []


@pytest.mark.parametrize(("field", "bad", "flag"), [(f, b, flag) for f, b, _, flag in REFUSED])
def test_each_refusal_names_its_flag(field: str, bad: Any, flag: str) -> None:
    (reason,) = compat.server_refusals(served(**{field: bad}))
    assert flag in reason


def test_a_quantised_drafter_is_refused() -> None:
    (reason,) = compat.server_refusals(
        served(
            speculative_draft_model_quantization="fp8",
            _speculative_draft_quantization_explicitly_set=True,
        )
    )
    assert "--speculative-draft-model-quantization" in reason


def test_all_refusals_come_at_once() -> None:
    reasons = compat.server_refusals(SimpleNamespace(**{f: bad for f, bad, _, _ in REFUSED}))
    text = "\n".join(reasons)
    for _, _, _, flag in REFUSED:
        assert flag in text


def test_refused_fields_are_real_fields() -> None:
    """A field that SGLang renamed would never be refused again."""
    from sglang.srt.server_args import ServerArgs

    source = ast.parse(inspect.getsource(compat.server_refusals))
    read = {
        node.args[0].value
        for node in ast.walk(source)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "get"
        and isinstance(node.args[0], ast.Constant)
    }
    read |= {field for field, *_ in REFUSED}
    assert read <= set(ServerArgs.__annotations__), read - set(ServerArgs.__annotations__)


def test_every_refused_flag_is_documented() -> None:
    page = DOCS.read_text(encoding="utf-8")
    section = page.partition("## Refused server arguments")[2].partition("\n## ")[0]
    reasons = compat.server_refusals(SimpleNamespace(**{f: bad for f, bad, _, _ in REFUSED}))
    flags = {flag for reason in reasons for flag in re.findall(r"--[a-z-]+", reason)}
    assert flags and not {flag for flag in flags if flag not in section}


def config(**changes: Any) -> LongSparkConfig:
    target = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
        "num_hidden_layers": 6,
        "rope_theta": 10000.0,
    }
    return LongSparkConfig.for_target(target, mask_token_id=3, num_layers=3, **changes)


@pytest.mark.parametrize("width", [None, 2, 5, 8])
def test_verify_widths_that_are_served(width: int | None) -> None:
    assert compat.verify_width_refusals(width, config()) == []


@pytest.mark.parametrize("width", [0, 1, 9])
def test_verify_widths_that_are_refused(width: int) -> None:
    (reason,) = compat.verify_width_refusals(width, config())
    assert f"--speculative-num-draft-tokens {width}" in reason and "2 to 8" in reason


def test_a_target_of_another_shape_is_refused_with_every_reason() -> None:
    target = {
        "hidden_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 1000,
        "num_hidden_layers": 6,
        "rope_theta": 10000.0,
        "layer_types": ["full_attention"] * 5 + ["sliding_attention"],
    }
    for form in (target, SimpleNamespace(**target)):
        text = "\n".join(compat.target_refusals(form, config()))
        for words in ("hidden_size 256", "num_key_value_heads 2", "full-attention layers"):
            assert words in text


# -- the plugin ------------------------------------------------------------------------------------


def test_the_plugin_registers_the_algorithm_and_its_hooks(registry: dict[str, Any]) -> None:
    plugin.register()
    found = SpeculativeAlgorithm.from_string("longspark")
    assert isinstance(found, LongSparkAlgorithm) and found is registry["LONGSPARK"]
    assert set(HookRegistry._hooks) == set(hooks.HOOKS)
    # Hooks are registered but this test applies none: the server would not start.
    with pytest.raises(RuntimeError, match="hooks were not applied"):
        found.validate_server_args(served())


def test_the_kill_switch(registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPARK_DISABLE", "1")
    plugin.register()
    assert registry == {} and not HookRegistry._hooks
    with pytest.raises(ValueError, match="Unknown speculative algorithm"):
        SpeculativeAlgorithm.from_string("LONGSPARK")
    monkeypatch.setenv("LONGSPARK_DISABLE", "0")
    plugin.register()
    assert "LONGSPARK" in registry


@pytest.mark.parametrize("broken", ["symbols", "import", "hooks"])
def test_a_plugin_that_fails_to_load_explains_itself(
    registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """SGLang only logs a plugin's exception; without this the user reads "unknown algorithm"."""
    if broken == "symbols":
        gone = compat.Symbol("sglang.srt.no_such_module", "name", "call")
        monkeypatch.setattr(compat, "SYMBOLS", (*compat.SYMBOLS, gone))
        words = "sglang.srt.no_such_module.name is gone"
    elif broken == "import":
        monkeypatch.setitem(sys.modules, "longspark_sglang.serving.algorithm", None)
        words = "longspark_sglang.serving.algorithm"
    else:

        def fail() -> None:
            raise TypeError("HookRegistry has changed")

        monkeypatch.setattr(hooks, "install", fail)
        words = "HookRegistry has changed"
    plugin.register()  # does not raise
    found = SpeculativeAlgorithm.from_string("LONGSPARK")
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        found.validate_server_args(served())
    assert "the LONGSPARK plugin failed to load with sglang 0.5.23" in str(refused.value)
    assert "longspark check" in str(refused.value)
    with pytest.raises(ValueError, match=re.escape(words)):
        found.factory(served())


# One process for all of these: each loads the plugins and resolves as launch_server does.
LAUNCH = """
import json, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
if sys.argv[1] == "broken":
    from longspark_sglang.serving import compat
    compat.SYMBOLS += (compat.Symbol("sglang.srt.no_such_module", "name", "call"),)
load_plugins()
for case in json.loads(sys.argv[2]):
    try:
        args = prepare_server_args(case)
        args.resolve_once()
        from sglang.srt.arg_groups.overrides import resolving_view
        view = resolving_view(args)
        print(json.dumps(["served", view.speculative_num_draft_tokens, view.max_running_requests]))
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def launch(mode: str, *cases: list[str]) -> list[list[Any]]:
    """What becomes of these command lines up to the point where weights would load."""
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "LONGSPARK_"))},
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, mode, json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == len(cases), done.stdout + done.stderr
    return [json.loads(line) for line in lines]


def test_the_launcher_lists_every_refusal_at_once(tiny_target: Path, tiny_drafter: Path) -> None:
    start = ["--model-path", str(tiny_target), "--device", "cpu"]
    ours = [*start, "--speculative-algorithm", "longspark"]
    drafter = ["--speculative-draft-model-path", str(tiny_drafter)]
    bad = ["--pp-size", "2", "--kv-cache-dtype", "fp8_e5m2", "--speculative-num-draft-tokens", "99"]
    several, no_path, no_drafter, good = launch(
        "sound",
        [*ours, *drafter, *bad],
        ours,
        [*ours, "--speculative-draft-model-path", str(tiny_target)],
        [*ours, *drafter],
    )
    assert several[0] == "ValueError"
    assert several[1].startswith("LONGSPARK cannot serve this configuration:\n  - ")
    for words in ("--pp-size 1", "--kv-cache-dtype auto", "draft-tokens 99"):
        assert words in several[1]
    assert "add --speculative-draft-model-path" in no_path[1]
    assert 'model_type is "qwen3"' in no_drafter[1]
    assert good == ["served", 8, 48]


def test_the_launcher_explains_a_broken_plugin(tiny_target: Path, tiny_drafter: Path) -> None:
    model = ["--model-path", str(tiny_target), "--device", "cpu"]
    plain = [*model, "--speculative-algorithm", "LONGSPARK"]
    # With a drafter SGLang would look into its folder first and complain about that.
    with_drafter = [*plain, "--speculative-draft-model-path", str(tiny_drafter)]
    for answer in launch("broken", plain, with_drafter):
        assert answer[0] == "ValueError"
        assert "the LONGSPARK plugin failed to load" in answer[1]
        assert "sglang.srt.no_such_module.name is gone" in answer[1]
        assert "Unknown speculative algorithm" not in answer[1]


def test_what_sglang_rewrites_before_it_asks_us() -> None:
    assert "--attn-dp-size 1" in compat.server_refusals(served(attn_dp_size=2))[0]
    copied = {"speculative_draft_model_quantization": "fp8"}  # of the target's --quantization
    mark = "_speculative_draft_quantization_explicitly_set"
    assert compat.server_refusals(served(**copied, **{mark: False})) == []
    for args in (served(**copied, **{mark: True}), served(**copied)):
        (reason,) = compat.server_refusals(args)
        assert "--speculative-draft-model-quantization" in reason


@pytest.mark.parametrize(("tp_size", "refused"), [(1, 0), (2, 0), (3, 3), (8, 1)])
def test_ranks_that_cannot_share_the_heads_are_refused(
    tiny_drafter: Path, tp_size: int, refused: int
) -> None:
    config = LongSparkConfig.from_pretrained(tiny_drafter)  # 4 query heads, 2 KV heads, MLP 512
    reasons = compat.parallel_refusals(tp_size, config)
    assert len(reasons) == refused
    assert all(f"--tp-size {tp_size}" in reason for reason in reasons)

import logging
import sys

import pytest
import torch
from longspark_sglang import ops
from longspark_sglang.ops import dispatch

ARGUMENTS = (torch.zeros(2, 4).long(), torch.zeros(2, 3).long(), torch.full((2,), 3).int())
OPERATORS = [
    "accept_chain",
    "accept_greedy",
    "block_attention",
    "draft_sample",
    "markov_step",
    "summary_merge",
    "summary_merge_bulk",
    "window_gather",
    "window_index",
    "window_index_paged",
]


@pytest.fixture(autouse=True)
def fresh_choices(monkeypatch):
    monkeypatch.delenv(dispatch.BACKEND_VARIABLE, raising=False)
    dispatch.forget_choices()
    yield
    dispatch.forget_choices()


@pytest.fixture
def no_extension(monkeypatch):
    monkeypatch.setattr(dispatch, "_extension_loaded", False)
    monkeypatch.setattr(dispatch, "_extension_problem", "the extension was not built")


def test_every_operator_is_public_and_has_a_reference():
    assert set(OPERATORS) <= set(dispatch.operators())
    assert all(callable(getattr(ops, op)) for op in OPERATORS)


def test_auto_without_the_extension_takes_plain_torch_and_says_so_once(no_extension, caplog):
    with caplog.at_level(logging.INFO):
        ops.accept_greedy(*ARGUMENTS)
        ops.accept_greedy(*ARGUMENTS)
    assert [(r.levelno, r.message) for r in caplog.records] == [
        (
            logging.WARNING,
            "longspark.accept_greedy on cpu: reference (the extension was not built)",
        )
    ]


def test_a_wished_choice_is_no_warning(caplog):
    with caplog.at_level(logging.INFO):
        ops.accept_greedy(*ARGUMENTS, backend="reference")
    assert caplog.records[0].levelno == logging.INFO


def test_the_variable_replaces_auto_only(monkeypatch, no_extension):
    monkeypatch.setenv(dispatch.BACKEND_VARIABLE, "cpu")
    with pytest.raises(ops.BackendError, match="backend 'cpu' was asked for, but the extension"):
        ops.accept_greedy(*ARGUMENTS)
    ops.accept_greedy(*ARGUMENTS, backend="reference")
    monkeypatch.setenv(dispatch.BACKEND_VARIABLE, "reference")
    ops.accept_greedy(*ARGUMENTS)


def test_unknown_backends_are_refused(monkeypatch):
    with pytest.raises(ops.BackendError, match="backend is 'tpu'; use one of auto, reference"):
        ops.accept_greedy(*ARGUMENTS, backend="tpu")
    monkeypatch.setenv(dispatch.BACKEND_VARIABLE, "fast")
    with pytest.raises(ops.BackendError, match="LONGSPARK_OPS_BACKEND is 'fast'; use one of"):
        ops.accept_greedy(*ARGUMENTS)


def test_a_backend_of_another_device_is_refused():
    with pytest.raises(ops.BackendError, match="'cuda' was asked for, but the tensors"):
        ops.accept_greedy(*ARGUMENTS, backend="cuda")


def test_an_explicit_backend_names_the_fix(no_extension):
    with pytest.raises(ops.BackendError, match="reinstall with LONGSPARK_BUILD=cpu"):
        ops.accept_greedy(*ARGUMENTS, backend="cpu")


def test_unknown_operators_are_refused():
    with pytest.raises(ops.BackendError, match="there is no operator 'nothing'; there are accept_"):
        dispatch.choose("nothing", "cpu")


def test_other_devices_are_served_by_plain_torch():
    assert dispatch.choose("markov_step", "meta") == (
        "reference",
        "nothing is compiled for device type meta",
    )


def test_an_extension_of_another_torch_is_a_reason_not_a_crash(monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "longspark_sglang._C":
                raise ImportError("undefined symbol: torch_version_x")
            return None

    monkeypatch.setattr(dispatch, "_extension_loaded", None)
    monkeypatch.setattr(dispatch, "_extension_problem", None)
    monkeypatch.delitem(sys.modules, "longspark_sglang._C", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    backend, reason = dispatch.choose("markov_step", "cpu")
    assert backend == "reference"
    assert reason == (
        "the extension can't be loaded (undefined symbol: torch_version_x); rebuild it"
    )


def test_sources_lists_every_operator(no_extension):
    sources = ops.sources("cpu")
    assert set(sources) == set(dispatch.operators()) and set(sources.values()) == {"reference"}


def test_a_second_reference_is_refused():
    with pytest.raises(ValueError, match="'markov_step' has two references"):
        dispatch.reference("markov_step")(print)

"""The taps keep the rows that are asked for, of the layers that are asked for, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("sglang")

from longspark_sglang.serving.taps import BoundaryTaps, TapError

H = 4


class Layer(nn.Module):
    """Adds one; hands the incoming stream to `capture_output`, as SGLang's decoder layers do."""

    def forward(self, positions, hidden_states, forward_batch, capture_output=None):
        if capture_output is not None:
            capture_output(hidden_states)
        return hidden_states + 1


class LogitsProcessor(nn.Module):
    def forward(self, input_ids, hidden_states, lm_head, metadata):
        return hidden_states.sum()


class Target(nn.Module):
    def __init__(self, layers: int = 4, layer=Layer) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(layer() for _ in range(layers))
        self.logits_processor = LogitsProcessor()

    def forward(self, hidden):
        for layer in self.model.layers:
            hidden = layer(None, hidden, None)
        return self.logits_processor(None, hidden * 100, None, None)


def taps_of(target: Target, layer_ids, rows: int = 8) -> BoundaryTaps:
    taps = BoundaryTaps(target, layer_ids)
    taps.allocate(rows, H, torch.float32, "cpu")
    return taps


def test_rows_and_layers_in_the_order_of_the_config() -> None:
    target = Target()
    taps = taps_of(target, [2, 0, 3])
    hidden = torch.arange(5.0)[:, None].expand(5, H)
    taps.rows = torch.tensor([4, 1])
    target(hidden)
    kept = taps.kept(2)  # [rows, taps, h]
    # After layer i the stream is hidden + i + 1; the last tap is the state the head receives.
    assert kept[:, 0, 0].tolist() == [7.0, 4.0]
    assert kept[:, 1, 0].tolist() == [5.0, 2.0]
    assert kept[:, 2, 0].tolist() == [800.0, 500.0]


def test_without_rows_a_block_pass_is_kept_whole_in_the_same_buffer() -> None:
    target = Target()
    taps = taps_of(target, [0], rows=6)
    pointer = taps.buffer.data_ptr()
    taps.rows = None
    target(torch.arange(6.0)[:, None].expand(6, H))
    assert taps.kept(6)[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6]
    target(torch.zeros(9, H))  # a padded pass: the rows beyond the buffer belong to nobody
    assert taps.kept(6).unique().tolist() == [1.0]
    assert taps.buffer.data_ptr() == pointer


def test_somebody_elses_capture_still_runs() -> None:
    target = Target()
    taps = taps_of(target, [0])
    taps.rows = torch.tensor([0])
    seen = []
    target.model.layers[1](
        None, torch.ones(1, H), None, capture_output=lambda x, owned=False: seen.append(x)
    )
    assert len(seen) == 1
    assert taps.kept(1)[0, 0, 0] == 1


def test_a_target_that_cannot_be_tapped_is_named() -> None:
    class Plain(nn.Module):
        def forward(self, positions, hidden_states, forward_batch):
            return hidden_states

    with pytest.raises(TapError, match="Target take no capture_output"):
        BoundaryTaps(Target(layer=Plain), [0])
    with pytest.raises(TapError, match=r"Linear has no model\.layers"):
        BoundaryTaps(nn.Linear(2, 2), [0])

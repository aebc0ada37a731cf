"""Layers compile whole, once for all layers of a model and all numbers of rows, and compute the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from replica.model.compiled_layers import compile_layers, restore_layers, try_compiled
from tests.replica.model.conftest import ModelFolder
from tests.replica.model.on_device import DeviceBase, differs, packed
from tests.replica.model.packed import PackedRunner, load_base, load_pairs, prompts
from tests.tiny_models import ARCHITECTURES, all_targets, make_adapter

TOLERANCE = 1e-4

BESIDE = {"gpt2": 1, "gemma3": 3}
"""Graphs of what stands beside the layers: norm and angles, where Gemma 3 has angles of two kinds and GPT-2 none."""


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(folder: Path) -> DeviceBase:
    """A base whose layers go through the compiler's front end, without its code generator."""
    device = DeviceBase(folder, compile="on")
    compile_layers(device.runner.layers, backend="aot_eager")
    return device


def steps(runner: PackedRunner, base: object, folder: Path, tmp_path: Path, architecture: str) -> torch.Tensor:
    """Prompts of several lengths, one and many sequences, decode steps, with an adapter and without."""
    adapter = make_adapter(folder, all_targets(architecture), 4, folder=tmp_path / "a")
    pairs = load_pairs(base, adapter)  # type: ignore[arg-type]
    texts = prompts([9, 14, 5, 22], seed=3)
    streams = [runner.start(text, pairs=chosen) for text, chosen in zip(texts, (None, None, pairs, pairs), strict=True)]
    parts = [runner.step([(stream, len(stream.tokens) - 3)]) for stream in streams]
    parts += [runner.step([(stream, 1) for stream in streams[:count]]) for count in (1, 3, 4)]
    return torch.cat(parts)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_graph_serves_all_layers_and_steps(architecture: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = model_folder(architecture)
    device, plain = compiled(folder), load_base(folder)
    ours = steps(packed(device), plain, folder, tmp_path / "ours", architecture)
    theirs = steps(PackedRunner(plain), plain, folder, tmp_path / "theirs", architecture)
    assert device.runner.is_compiled
    assert counters["stats"]["unique_graphs"] == len(("with adapters", "without")) + BESIDE.get(architecture, 2)
    assert not counters["graph_break"]
    assert differs(ours, theirs) <= TOLERANCE


def test_layers_that_do_not_compile_run_eagerly_and_say_so(
    model_folder: ModelFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder = model_folder("llama")
    device = DeviceBase(folder)
    for layer in device.runner.layers:
        break_up(layer)
    device.runner.is_compiled = True
    runner = packed(device)
    assert not device.runner.is_compiled
    assert "do not compile" in caplog.text
    text = prompts([9])[0]
    plain = PackedRunner(load_base(folder))
    assert differs(runner.step([(runner.start(text), 9)]), plain.step([(plain.start(text), 9)])) <= TOLERANCE


def break_up(layer: torch.nn.Module) -> None:
    """Give a layer a compiled forward in which the compiler finds something that it cannot take in."""
    own = type(layer).forward

    def broken(*arguments: object, **keywords: object) -> object:
        torch._dynamo.graph_break()
        return own(layer, *arguments, **keywords)

    layer.forward = torch.compile(broken, fullgraph=True, backend="eager")


def test_an_error_that_is_not_the_compilers_is_raised() -> None:
    def warm_up() -> None:
        raise RuntimeError("out of something")

    with pytest.raises(RuntimeError, match="out of something"):
        try_compiled([], warm_up)


def test_restored_layers_have_their_own_forward(model_folder: ModelFolder) -> None:
    layers = compiled(model_folder("llama")).runner.layers
    restore_layers(layers)
    assert not any("forward" in layer.__dict__ for layer in layers)

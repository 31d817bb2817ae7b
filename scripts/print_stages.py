"""Writes docs/step-by-step.md: one small model, printed through every stage.

python scripts/print_stages.py            # rewrites the page
python scripts/print_stages.py --check    # exit 1 when the page no longer says what the code does
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from wholestep.capture.dry import capture_example
from wholestep.capture.subject import make_subject
from wholestep.graph.printer import to_python
from wholestep.graph.training_graph import TrainingGraph
from wholestep.lower import lower_interpret
from wholestep.passes.pipeline import default_pipeline

PAGE = Path(__file__).resolve().parent.parent / "docs" / "step-by-step.md"


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(8), Layer(8), Layer(8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mean_square(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def captured() -> TrainingGraph:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    subject = make_subject(model, mean_square, optimizer, clip_norm=1.0)
    return capture_example(subject, batch).graph


def source_of(*things: object) -> str:
    import inspect

    return "\n\n".join(inspect.getsource(thing) for thing in things).rstrip()  # type: ignore[arg-type]


def page() -> str:
    """The whole page; times are left out, so that it is the same on every machine."""
    graph = captured()
    printed = to_python(graph)
    rewritten, _ = default_pipeline().run(graph)
    driver = lower_interpret(rewritten).describe()["driver"]
    code = "\n\n```python\n{}\n```"
    ending = "\n".join(driver.rstrip().splitlines()[-12:])
    parts = [
        "# One model through every stage",
        "Written by `scripts/print_stages.py`; a test checks that it is still true.",
        "## What the user has" + code.format(source_of(Layer, Model, mean_square)),
        "with AdamW, `clip_norm=1.0`, and a batch of two 4x8 tensors.",
        "## Captured",
        "The whole step as one functional program: equal layers are printed once and called as often as they occur. Every\n"
        "line carries its shape, its module and the user's source line. It runs: `step(*inputs)` returns the loss, the\n"
        "gradient norm and all new values." + code.format(printed.rstrip()),
        "## After the passes",
        "No pass finds anything here: there is no attention for `recognise_masks`, no bf16 for `lean_gradients`, and\n"
        'clipping needs all gradients before `update_early` could update a layer. With `dump="folder"`, `compile` writes the\n'
        "program after each pass.",
        "## Lowered",
        "Updates become writes into the tensors that hold the state, and one flat function calls the operators (backend\n"
        "`interpret`) or the compiled regions (backend `inductor`), freeing each value at its last use. The end of it:"
        + code.format(ending),
    ]
    return re.sub(r"in \d+\.\d+ s", "in ... s", "\n\n".join(parts)) + "\n"


def main() -> int:
    text = page()
    if "--check" in sys.argv:
        return 0 if PAGE.read_text("utf-8") == text else 1
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Draw the picture of the README: rotated digits, and the range of rotations learnt from them.

``python docs/make_picture.py`` runs what ``make demo`` runs, under a minute, and writes
``docs/images/learnt.png``. ``--run DIRECTORY`` draws a finished run of that kind instead, such as
the one that ``make demo`` left in ``demo``. All that is drawn comes from the files of the run.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from laplace_invariance import AffineImage, plots
from laplace_invariance.datasets import load, transformed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = Path(__file__).parent / "images" / "learnt.png"
INK, ACCENT, FAINT, GREY = "#22303c", "#c8452d", "#9aa5ad", "#6b7780"
EPOCHS = (1, 6, 9, 14, 100)  # rows of samples
N_DATA, N_SAMPLES = 4, 9  # columns of training images, and of samples
TILE, MARGIN, TITLE = 0.52, 0.42, 0.5  # inches
DIGIT, SHOWN = 2, 88  # the image of which samples are drawn: its class, and which of them
SIZE = (12.0, 5 * TILE + MARGIN + TITLE)


def run(directory: Path) -> None:
    """Learn on fully rotated digits, from ranges of zero, and leave the files in a directory."""
    options = ["--data", "digits", "--transform", "fully-rotated", "--start", "closed"]
    options += ["--out", str(directory)]
    subprocess.run([sys.executable, "-m", "laplace_invariance", "learn", *options], check=True)


def axes(figure: Figure, left: float, width: float, title: str) -> Axes:
    """Add axes as high as all tiles, placed in inches from the left."""
    made = figure.add_axes((left / SIZE[0], MARGIN / SIZE[1], width / SIZE[0], 5 * TILE / SIZE[1]))
    made.set_title(title, fontsize=10.5, color=INK, pad=9)
    return made


def mosaic(images: Tensor, columns: int, ax: Axes) -> None:
    """Show images ``[n, 1, h, w]`` row by row, smoothly enlarged, in dark ink on white."""
    from matplotlib.colors import LinearSegmentedColormap

    large = F.interpolate(F.pad(images, (1, 1, 1, 1)), scale_factor=8, mode="bicubic")
    grid = rearrange(large, "(row column) 1 h w -> (row h) (column w)", column=columns)
    paper = LinearSegmentedColormap.from_list("ink on paper", ["white", INK])
    ax.imshow(grid.clamp(0, 1), cmap=paper, vmin=0, vmax=1, aspect="auto")
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def draw_samples(image: Tensor, history: list[dict[str, Any]], ax: Axes) -> None:
    """Draw an image ``[1, 1, h, w]`` under the ranges of several epochs.

    All rows have the same draws, in the order of their angles.
    """
    draws = AffineImage().sample(1, N_SAMPLES, torch.Generator().manual_seed(0))
    draws = draws[:, draws[0, :, AffineImage().names.index("rotation")].argsort()]
    rows, labels = [], []
    for epoch in EPOCHS:
        ranges = history[epoch - 1]["ranges"]["augmentation"]
        rows.append(AffineImage(init=ranges).transform(image, draws)[0])
        labels.append(f"epoch {epoch}\n±{math.degrees(ranges['rotation']):.0f}°")
    mosaic(torch.cat(rows), N_SAMPLES, ax)
    height = (image.shape[-1] + 2) * 8
    middles = [height * (row + 0.5) for row in range(len(EPOCHS))]
    ax.set_yticks(middles, labels, fontsize=9, color=INK)
    ax.tick_params(length=0)


def draw_ranges(history: list[dict[str, Any]], summary: dict[str, Any], ax: Axes) -> None:
    """Draw all ranges over epochs; rotation is the one that the data have."""
    epochs = [record["epoch"] for record in history]
    ranges = [record["ranges"]["augmentation"] for record in history]
    for name in ranges[0]:
        if name != "rotation":
            ax.plot(epochs, [values[name] for values in ranges], color=FAINT, lw=1.2)
    rotation = [values["rotation"] for values in ranges]
    ax.plot(epochs, rotation, color=ACCENT, lw=2.6)
    shown = [rotation[epoch - 1] for epoch in EPOCHS]
    ax.plot(EPOCHS, shown, "o", color=ACCENT, mec="white", mew=1.2, ms=7, clip_on=False, zorder=5)
    ax.axhline(math.pi, color=INK, ls=(0, (5, 4)), lw=1.1, zorder=1)
    ax.text(2, math.pi + 0.08, "true range ±180.0 degrees", color=INK, fontsize=9)
    learnt = f"rotation\n{summary['ranges']['rotation']}"
    ax.text(100, 2.1, learnt, color=ACCENT, fontsize=11, ha="right", fontweight="bold")
    others = max(value for name, value in summary["magnitudes"].items() if name != "rotation")
    label = f"translations, scales, shear: at most {others:.3f}"
    ax.text(100, 0.14, label, color=GREY, fontsize=9, ha="right")
    ax.set(xlim=(0, 101), ylim=(0, 3.6))
    ax.set_xlabel("epoch", fontsize=9, color=INK, labelpad=1)
    ax.set_yticks([0, math.pi / 4, math.pi / 2, 3 * math.pi / 4, math.pi])
    ax.set_yticklabels(["0", "45°", "90°", "135°", "180°"])
    ax.tick_params(colors=INK, labelsize=9)
    ax.spines[["top", "right"]].set_visible(False)


def draw(directory: Path, picture: Path) -> None:
    """Draw a finished run.

    Args:
        directory: Output directory of ``laplace-invariance learn``.
        picture: Path of the PNG file to write.
    """
    lines = (directory / "history.jsonl").read_text().splitlines()
    history = [json.loads(line) for line in lines]
    summary = json.loads((directory / "summary.json").read_text())
    split = load("digits")
    images = transformed(split.x_train, "fully_rotated", torch.Generator().manual_seed(0))
    upright = split.x_train[split.y_train == DIGIT]

    figure = plots.figure(SIZE)
    figure.set_layout_engine("none")
    data = axes(figure, 0.15, N_DATA * TILE, "training images,\neach rotated at random")
    mosaic(images[: N_DATA * len(EPOCHS)], N_DATA, data)
    title = (
        "one image under the augmentation as it is learnt:\nsamples, in the order of their angles"
    )
    samples = axes(figure, 3.1, N_SAMPLES * TILE, title)
    draw_samples(upright[SHOWN : SHOWN + 1], history, samples)
    draw_ranges(history, summary, axes(figure, 8.5, 3.25, "learnt ranges,\nall zero at the start"))
    save(figure, picture)


def save(figure: Figure, picture: Path) -> None:
    """Write a PNG of 64 colours, a third of the size of one with all."""
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130)
    picture.parent.mkdir(parents=True, exist_ok=True)
    Image.open(buffer).convert("RGB").quantize(64).save(picture, optimize=True)


def main() -> None:
    """Run, unless a finished run is given, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, metavar="DIRECTORY", help="draw this finished run")
    parser.add_argument("--out", type=Path, default=PICTURE, metavar="FILE", help="PNG to write")
    arguments = parser.parse_args()
    if arguments.run is not None:
        draw(arguments.run, arguments.out)
        return
    with tempfile.TemporaryDirectory() as directory:
        run(Path(directory))
        draw(Path(directory), arguments.out)


if __name__ == "__main__":
    main()

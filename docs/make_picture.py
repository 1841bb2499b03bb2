"""Draw the picture of the README: what the search tries on rotated digits, and what is learnt.

``python docs/make_picture.py`` runs what ``make demo`` runs, about a minute, and writes
``docs/images/learnt.gif``. ``--run DIRECTORY`` draws a finished run of that kind instead, such as
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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image, ImageColor
from torch import Tensor

from laplace_invariance import AffineImage, plots
from laplace_invariance.datasets import load, transformed
from laplace_invariance.marglik.search import SearchResult, Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = Path(__file__).parent / "images" / "learnt.gif"
INK, ACCENT, FAINT, GREY = "#22303c", "#c8452d", "#c3cad0", "#6b7780"
ROWS, N_DATA, N_SAMPLES = 5, 5, 6  # rows and columns of training images and of samples
TILE, MARGIN, TITLE = 0.5, 0.2, 0.62  # inches
SIZE = (10.4, ROWS * TILE + MARGIN + TITLE)
DIGIT, SHOWN = 2, 88  # the image of which samples are drawn: its class, and which of them
TRIED, LEARNT = 650, 6000  # milliseconds that a candidate and the result are shown
SHADES = 12  # of each colour, down to white
TOGETHER = {("x_translation", "y_translation"): "shifts", ("x_scale", "y_scale"): "scales"}


def run(directory: Path) -> None:
    """Learn on fully rotated digits, with a search, and leave the files in a directory."""
    options = ["--data", "digits", "--transform", "fully-rotated", "--out", str(directory)]
    subprocess.run([sys.executable, "-m", "laplace_invariance", "learn", *options], check=True)


def mosaic(images: Tensor, columns: int, ax: Axes) -> None:
    """Show images ``[n, 1, h, w]`` row by row, smoothly enlarged, in dark ink on white."""
    from matplotlib.colors import LinearSegmentedColormap

    large = F.interpolate(F.pad(images, (1, 1, 1, 1)), scale_factor=8, mode="bicubic")
    grid = rearrange(large, "(row column) 1 h w -> (row h) (column w)", column=columns)
    paper = LinearSegmentedColormap.from_list("ink on paper", ["white", INK])
    ax.imshow(grid.clamp(0, 1), cmap=paper, vmin=0, vmax=1, aspect="auto")
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def samples(image: Tensor, ranges: dict[str, float]) -> Tensor:
    """Return samples of an image ``[1, 1, h, w]`` under ranges, the same draws for all ranges."""
    n_samples = ROWS * N_SAMPLES
    draws = AffineImage().sample(1, n_samples, torch.Generator().manual_seed(0))
    return AffineImage(init=ranges).transform(image, draws)[0]


def in_words(ranges: dict[str, float]) -> str:
    """Return in a few words which ranges are open, such as ``rotation ±45° and shear``."""
    words = []
    if "rotation" in ranges:
        words.append(f"rotation ±{math.degrees(ranges['rotation']):.0f}°")
    words += [word for names, word in TOGETHER.items() if ranges.keys() & set(names)]
    words += ["shear"] * ("shear" in ranges)
    return (
        " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words) or "nothing"
    )


def draw_trials(trials: Sequence[Trial], n_all: int, ax: Axes) -> None:
    """Draw by how much evidence candidates lost, in the order of trial; the last one is new."""
    for place, trial in enumerate(trials):
        is_best = trial.loss == 0
        color = ACCENT if is_best else GREY if trial is trials[-1] else FAINT
        ax.barh(place, max(trial.loss, 0.008), 0.72, color=color)
        label = f"the best: {in_words(trial.ranges)}" if is_best else f"{trial.loss:.2f}"
        size = 10 if is_best else 8
        if is_best or trial is trials[-1]:
            ax.text(trial.loss + 0.02, place, label, color=color, va="center", fontsize=size)
    ax.set(xlim=(0, 0.8), ylim=(n_all - 0.4, -0.6), xticks=[], yticks=[])
    ax.spines[["top", "right", "bottom"]].set_visible(False)


def frame(
    data: Tensor, shown: Tensor, title: str, color: str, trials: Sequence[Trial], n_all: int
) -> Image.Image:
    """Draw one picture of the animation."""
    figure = plots.figure(SIZE)
    figure.set_layout_engine("none")
    lefts = {"data": 0.15, "samples": 3.2, "trials": 6.9}
    widths = {"data": N_DATA * TILE, "samples": N_SAMPLES * TILE, "trials": 3.2}
    axes = {
        name: figure.add_axes(
            (left / SIZE[0], MARGIN / SIZE[1], widths[name] / SIZE[0], ROWS * TILE / SIZE[1])
        )
        for name, left in lefts.items()
    }
    text = {"fontsize": 10, "color": INK, "pad": 8}
    mosaic(data, N_DATA, axes["data"])
    axes["data"].set_title("training images,\neach rotated at random", **text)
    mosaic(shown, N_SAMPLES, axes["samples"])
    axes["samples"].set_title(title, **{**text, "color": color})
    draw_trials(trials, n_all, axes["trials"])
    axes["trials"].set_title("log evidence that each candidate\nloses, per image", **text)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=90)
    return Image.open(buffer).convert("RGB")


def draw(directory: Path, picture: Path) -> None:
    """Draw a finished run.

    Args:
        directory: Output directory of ``laplace-invariance learn``.
        picture: Path of the GIF file to write.
    """
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    split = load("digits")
    generator = torch.Generator().manual_seed(0)
    data = transformed(split.x_train, "fully_rotated", generator)[: ROWS * N_DATA]
    image = split.x_train[split.y_train == DIGIT][SHOWN : SHOWN + 1]

    found = SearchResult.from_state_dict(summary["search"])
    trials = sorted(found.trials, key=lambda trial: (trial.n_steps, -trial.loss))
    frames = []
    for n in range(1, len(trials) + 1):
        title = f"is the class the same under\n{in_words(trials[n - 1].ranges)}?"
        shown = samples(image, trials[n - 1].ranges)
        frames.append(frame(data, shown, title, INK, trials[:n], len(trials)))
    title = f"learnt: rotation\n{summary['ranges']['rotation']}"
    shown = samples(image, summary["magnitudes"])
    frames.append(frame(data, shown, title, ACCENT, trials, len(trials)))
    save(frames, picture)


def shades_of(color: str) -> list[tuple[int, ...]]:
    """Return a colour and lighter ones of it, down to white, as bytes."""
    dark = ImageColor.getrgb(color)
    parts = [i / (SHADES - 1) for i in range(SHADES)]
    return [tuple(round(255 - part * (255 - value)) for value in dark) for part in parts]


def save(frames: Sequence[Image.Image], picture: Path) -> None:
    """Write an animation of few colours, the same in all frames, which repeats."""
    shades = [shade for color in (INK, ACCENT, GREY) for shade in shades_of(color)]
    palette = Image.new("P", (1, 1))
    palette.putpalette([value for shade in shades for value in shade])
    few = [one.quantize(palette=palette, dither=Image.Dither.NONE) for one in frames]
    picture.parent.mkdir(parents=True, exist_ok=True)
    durations = [TRIED] * (len(few) - 1) + [LEARNT]
    few[0].save(
        picture, save_all=True, append_images=few[1:], duration=durations, loop=0, optimize=True
    )


def main() -> None:
    """Run, unless a finished run is given, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, metavar="DIRECTORY", help="draw this finished run")
    parser.add_argument("--out", type=Path, default=PICTURE, metavar="FILE", help="GIF to write")
    arguments = parser.parse_args()
    if arguments.run is not None:
        draw(arguments.run, arguments.out)
        return
    with tempfile.TemporaryDirectory() as directory:
        run(Path(directory) / "run")
        draw(Path(directory) / "run", arguments.out)


if __name__ == "__main__":
    main()

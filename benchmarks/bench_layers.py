"""Time and memory of factored layers and of block-diagonal factors, against dense formulations.

``python benchmarks/bench_layers.py`` measures and prints tables; ``--write`` also keeps them in
benchmarks/README.md. Times are the minimum of several rounds in which both sides alternate in one
process; memory is that of a fresh process each, as peak above the start.
"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path

import bench

# channels in and out, height = width in and out
SIZES = ((3, 10, 32, 32), (10, 20, 32, 16), (20, 40, 16, 8), (40, 80, 8, 8))
FORMULATIONS = ("factored", "block-diagonal")
BATCH = 128
N_IMAGES = 5000
DENSE_WIDTH = 2  # at which dense factors still fit

fresh = functools.partial(bench.fresh, module="bench_layers")


def factored(size: tuple[int, ...], formulation: str):
    """Return a function that runs a factored layer forward and backward.

    The formulation "block-diagonal" places inputs in blocks of a large, mostly empty matrix.
    """
    import torch
    from einops import rearrange

    from laplace_invariance.layers import FactoredLinear2d

    torch.manual_seed(0)
    torch.set_num_threads(2)
    n_in, n_out, before, after = size
    layer = FactoredLinear2d(n_in, n_out, before, after)
    x = torch.randn(BATCH, n_in, before, before, requires_grad=True)

    def placed(z: torch.Tensor) -> torch.Tensor:
        """Bring ``[n, slots, d]`` to ``[n, slots * d, slots]``: slot q in column q, else zeros."""
        return rearrange(torch.diag_embed(z.mT), "n d p q -> n (p d) q")

    def dense(x: torch.Tensor) -> torch.Tensor:
        z = layer.theta_2.weight @ placed(x.flatten(2)) + layer.theta_2.bias.unsqueeze(1)
        y = layer.theta_1.weight @ placed(z) + layer.theta_1.bias.unsqueeze(1)
        return y.mT.unflatten(2, layer.out_shape)

    forward = layer if formulation == "factored" else dense
    direction = torch.randn(BATCH, n_out, after, after)

    def step() -> torch.Tensor:
        layer.zero_grad()
        x.grad = None
        y = forward(x)
        y.backward(direction)
        return y.detach()

    return step


def layer_times(size: tuple[int, ...], rounds: int) -> dict[str, float]:
    """Return the smallest time of both formulations, in seconds."""
    import torch

    steps = {formulation: factored(size, formulation) for formulation in FORMULATIONS}
    torch.testing.assert_close(*(step() for step in steps.values()), rtol=1e-3, atol=1e-4)
    return bench.fastest(steps, rounds)


def layer_memory(size: tuple[int, ...], formulation: str) -> float:
    """Return the peak memory of a step above the start, in MB."""
    factored((2, 3, 4, 4), formulation)()  # libraries allocate when first used
    step = factored(size, formulation)
    start = bench.resident()
    step()
    return bench.peak() - start


def use_dense_factors() -> None:
    """Replace the rule of factored layers by one that has each factor as one large matrix."""
    import torch
    from einops import rearrange

    from laplace_invariance.curvature import ElementwiseBlock, MatrixBlock, register_rule
    from laplace_invariance.layers import SlotLinear

    def placed(x: torch.Tensor) -> torch.Tensor:
        return rearrange(torch.diag_embed(x.mT), "n d p q -> n q (p d)")

    @register_rule(SlotLinear, overwrite=True)
    def one_large_matrix(module):
        yield MatrixBlock("weight", placed, lambda g: g)
        yield ElementwiseBlock("bias", None, lambda g: g)


def training_data(n_images: int, images: str | None) -> tuple:
    """Return images, standardised, and labels; noise if there is no file of images."""
    import torch

    from laplace_invariance import datasets
    from laplace_invariance.layers import Standardise

    if images is None:
        return torch.randn(n_images, 3, 32, 32), torch.randint(10, (n_images,))
    split = datasets.load(images, n_train=n_images)
    return Standardise.of(split.x_train)(split.x_train), split.y_train


def network_fit(width: int, factors: str, n_images: int, images: str | None) -> dict[str, float]:
    """Fit Laplace to the f_fc+conv network and differentiate its evidence in all priors."""
    import torch
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    from laplace_invariance.curvature import AugmentedGGN
    from laplace_invariance.layers import equivariant_cnn

    torch.manual_seed(0)
    torch.set_num_threads(2)
    if factors == "dense":
        use_dense_factors()
    x, y = training_data(n_images, images)
    net = equivariant_cnn("f_fc+conv", 3, 10, width)
    la = Laplace(
        net,
        "classification",
        subset_of_weights="all",
        hessian_structure="kron",
        backend=AugmentedGGN,
    )
    before, start = bench.resident(), time.perf_counter()
    la.fit(DataLoader(TensorDataset(x, y), batch_size=250))
    fitted = time.perf_counter()
    log_precision = torch.zeros(len(list(net.parameters())), requires_grad=True)
    la.log_marginal_likelihood(log_precision.exp()).backward()
    stop = time.perf_counter()
    assert torch.isfinite(log_precision.grad).all()
    assert (log_precision.grad != 0).all()
    return {
        "parameters": sum(p.numel() for p in net.parameters()),
        "fit": fitted - start,
        "backward": stop - fitted,
        "memory": bench.peak() - before,
    }


def layer_table(rounds: int) -> str:
    """Measure both formulations at all sizes, and return a table."""
    rows = []
    for size in SIZES:
        n_in, n_out, before, after = size
        print(f"F-FC {n_in} -> {n_out}, {before} x {before} ...", file=sys.stderr, flush=True)
        seconds = fresh(f"layer_times({size}, {rounds})")
        ours, dense = seconds["factored"], seconds["block-diagonal"]
        memory = [fresh(f"layer_memory({size}, {name!r})") for name in FORMULATIONS]
        row = [f"{n_in} -> {n_out}, {before} x {before} -> {after} x {after}"]
        row += [f"{ours * 1e3:.1f} ms", f"{dense * 1e3:.1f} ms", f"{dense / ours:.1f}x"]
        rows.append([*row, f"{memory[0]:.0f}", f"{memory[1]:.0f}", f"{memory[1] / memory[0]:.1f}x"])
    header = ["F-FC, forward + backward", *FORMULATIONS, "ratio", "MB", "MB", "ratio"]
    return bench.table(header, rows)


def fit_table(n_images: int, images: str | None) -> str:
    """Measure fits with factors in blocks and as one matrix each, and return a table."""
    rows = []
    cases = (
        (10, "blocks", n_images),
        (DENSE_WIDTH, "blocks", n_images // 5),
        (DENSE_WIDTH, "dense", n_images // 5),
    )
    for width, factors, n in cases:
        print(f"width {width}, {factors}, {n} images ...", file=sys.stderr, flush=True)
        result = fresh(f"network_fit({width}, {factors!r}, {n}, {images!r})")
        row = [f"width {width}, {result['parameters']:,} parameters, {n:,} images, {factors}"]
        row += [f"{result['fit']:.0f} s", f"{result['backward']:.2f} s"]
        rows.append([*row, f"{result['memory']:.0f}"])
    header = [
        "f_fc+conv, 3 x 32 x 32, exact GGN",
        "fit",
        "evidence and gradient in all priors",
        "peak MB above the start",
    ]
    return bench.table(header, rows)


def main() -> None:
    """Measure, print the tables, and write them if asked to."""
    parser = bench.parser(__doc__, rounds=15)
    parser.add_argument(
        "--images",
        type=Path,
        help="FILE.npz with x_train and y_train, 32 x 32 in colour; default: noise",
    )
    parser.add_argument(
        "--n-images", type=int, default=N_IMAGES, help="number to fit (default: %(default)s)"
    )
    arguments = parser.parse_args()
    images = None if arguments.images is None else str(arguments.images.resolve())
    text = "\n\n".join([layer_table(arguments.rounds), fit_table(arguments.n_images, images)])
    print(text)
    if arguments.write:
        bench.write("layers", text)


if __name__ == "__main__":
    main()

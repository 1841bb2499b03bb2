"""Which networks of torchvision, timm and transformers get Kronecker curvature, and a gradient.

``python benchmarks/bench_zoo.py`` looks at what has no result yet, one process per network, and
writes one small file for each to benchmarks/results/zoo; ``--table`` prints the table of what is
there, and ``--write`` keeps it in benchmarks/README.md. Networks have random weights, nothing is
downloaded; those that are marked ``*`` are the code of their package with fewer or narrower layers.
Needs ``pip install laplace-invariance[zoo]``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import bench
from runs import file_name, options, results, run_missing

RESULTS = bench.ROOT / "benchmarks/results/zoo"
BATCH, SAMPLES, CLASSES = 4, 2, 10

TORCHVISION = {
    "squeezenet1_1": {},
    "vgg11*": {},
    "alexnet*": {},
    "resnet18": {},
    "wide_resnet*": {},
    "resnext50_32x4d": {},
    "googlenet": {"init_weights": False, "aux_logits": False},
    "inception_v3": {"init_weights": False, "aux_logits": False},
    "densenet121": {},
    "shufflenet_v2_x0_5": {},
    "mnasnet0_5": {},
    "regnet_y_400mf": {},
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "efficientnet_b0": {},
    "convnext*": {},
    "vit*": {},
    "swin*": {},
    "maxvit*": {},
}
TIMM: dict[str, dict[str, Any]] = {
    "mixer_s32_224": {"img_size": 64},
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 4},
    "cait_xxs24_224": {"img_size": 64, "depth": 4},
    "beit_base_patch16_224": {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3},
    "xcit_nano_12_p16_224": {"depth": 4},
    "convnextv2_atto": {},
    "poolformer_s12": {},
    "pvt_v2_b0": {},
    "repvgg_a0": {},
    "ghostnet_100": {},
    "mobilevit_xxs": {},
    "nf_resnet26": {},
}
TRANSFORMERS = ("BERT", "DistilBERT", "GPT-2", "ViT")


class Run(NamedTuple):
    """One network."""

    package: str
    name: str

    @property
    def path(self) -> Path:
        """Return the file of the result."""
        return RESULTS / file_name(self).replace("*", "")


def runs() -> list[Run]:
    """Return all networks."""
    return [
        *(Run("torchvision", name) for name in TORCHVISION),
        *(Run("timm", name) for name in TIMM),
        *(Run("transformers", name) for name in TRANSFORMERS),
    ]


def torchvision_network(name: str):
    """Return a network of torchvision; without classes named after it, by its own builder."""
    from torchvision.models import alexnet, convnext, get_model, maxvit, resnet, vgg
    from torchvision.models.swin_transformer import SwinTransformer
    from torchvision.models.vision_transformer import VisionTransformer

    narrow: dict[str, Callable] = {
        "vgg11*": lambda: narrowed(vgg.vgg11(num_classes=CLASSES), 64),
        "alexnet*": lambda: narrowed(alexnet(num_classes=CLASSES), 64),
        "wide_resnet*": lambda: resnet.ResNet(
            resnet.Bottleneck, [1, 1, 1, 1], CLASSES, width_per_group=128
        ),
        "convnext*": lambda: convnext.ConvNeXt(
            [convnext.CNBlockConfig(24, 48, 1), convnext.CNBlockConfig(48, None, 1)],
            num_classes=CLASSES,
        ),
        "vit*": lambda: VisionTransformer(64, 16, 4, 4, 96, 192, num_classes=CLASSES),
        "swin*": lambda: SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4], num_classes=CLASSES),
        "maxvit*": lambda: maxvit.MaxVit(
            (64, 64), 16, 2, [16, 32], [1, 1], 8, 0.0, num_classes=CLASSES
        ),
    }
    if name in narrow:
        return narrow[name]()
    return get_model(name, num_classes=CLASSES, **TORCHVISION[name])


def narrowed(net, width: int):
    """Return a network whose classifier, by far its largest part, is narrower."""
    from torch import nn

    layers = [m for m in net.classifier if isinstance(m, nn.Linear)]
    features = layers[0].in_features
    net.classifier = nn.Sequential(
        nn.Linear(features, width), nn.ReLU(), nn.Linear(width, layers[-1].out_features)
    )
    return net


def transformers_network(name: str):
    """Return a small network of transformers that takes a mapping and returns logits."""
    import transformers as t
    from torch import nn

    class Logits(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(**x).logits

    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"intermediate_size": 64, "num_labels": CLASSES}
    text = {"vocab_size": 100, "max_position_embeddings": 16}
    if name == "BERT":
        net = t.BertForSequenceClassification(t.BertConfig(**text, **size))
    elif name == "DistilBERT":
        own = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "num_labels": CLASSES}
        net = t.DistilBertForSequenceClassification(t.DistilBertConfig(**text, **own))
    elif name == "GPT-2":
        own = {"n_embd": 32, "n_layer": 2, "n_head": 2, "num_labels": CLASSES, "pad_token_id": 0}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        config = t.GPT2Config(vocab_size=100, n_positions=16, **own, **ends)
        net = t.GPT2ForSequenceClassification(config)
    else:
        net = t.ViTForImageClassification(t.ViTConfig(image_size=32, patch_size=8, **size))
    return Logits(net)


def network(run: Run):
    """Return a network with random weights, and inputs for it."""
    import torch

    if run.package == "transformers":
        net = transformers_network(run.name)
        if run.name == "ViT":
            return net, {"pixel_values": torch.randn(BATCH, 3, 32, 32)}
        tokens = torch.randint(1, 100, (BATCH, 8))
        return net, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    size = 75 if run.name == "inception_v3" else 64
    if run.package == "torchvision":
        net = torchvision_network(run.name)
    else:
        import timm

        net = timm.create_model(run.name, num_classes=CLASSES, **TIMM[run.name])
    return net, torch.randn(BATCH, 3, size, size)


def train(run: Run) -> dict[str, Any]:
    """Look at one network."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    net, x = network(run)
    with torch.no_grad():
        for _ in range(2):  # statistics of norms
            net.train()(x)
    net.eval()
    key = "input_ids" if isinstance(x, dict) and "input_ids" in x else "pixel_values"
    found: dict[str, Any] = {
        **run._asdict(),
        "n_parameters": sum(p.numel() for p in net.parameters()),
    }
    found |= ours(net, x, key)
    found["stock"] = stock(net, x, key)
    return found


def ours(net, x, key: str) -> dict[str, Any]:
    """Return coverage, and the costs of factors and of the gradient in steps of training."""
    import torch

    import laplace_invariance as li
    from laplace_invariance.curvature import AugmentedGGN, check_model

    report = check_model(net, x)
    covered = sum(row.supported for row in report.rows)
    found = {"covered": covered, "of": len(report.rows), "error": None}
    if not report:
        found["error"] = next(f"{r.name}: {r.reason}" for r in report.rows if r.reason)
        return found
    is_text = key == "input_ids" and isinstance(x, dict)
    model, learnt = net, []
    if not is_text:
        augmentation = li.AffineImage(init=0.1)
        model = li.InvariantModel(net, augmentation, SAMPLES, dict_key_x=key)
        learnt = [augmentation.eta]
    y = torch.arange(BATCH) % CLASSES
    try:
        step = least_time(lambda: torch.nn.functional.cross_entropy(model(x), y).backward())
        backend = AugmentedGGN(
            model, "classification", stochastic=True, num_samples=1, dict_key_x=key
        )
        backend.kron(x, y, N=BATCH)  # verifies
        with torch.no_grad():
            found["kron"] = least_time(lambda: backend.kron(x, y, N=BATCH)) / step
        if learnt:
            _, kron = backend.kron(x, y, N=BATCH)
            total = sum(f.square().sum() for own in kron.kfacs for f in own)
            started = time.thread_time()
            total.backward()
            found["gradient"] = (time.thread_time() - started) / step
            gradient = learnt[0].grad
            if not (torch.isfinite(gradient).all() and gradient.any()):
                found["error"] = f"the gradient is {gradient.tolist()}"
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[:300]
    return found


def least_time(function: Callable[[], Any], repeats: int = 3) -> float:
    """Return the least time of a few calls."""
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        function()
        times.append(time.thread_time() - started)
    return min(times)


def stock(net, x, key: str) -> str | None:
    """Return why laplace's own backend refuses a network, None if it does not."""
    import torch
    from laplace.curvature import CurvlinopsGGN

    y = torch.arange(BATCH) % CLASSES
    try:
        CurvlinopsGGN(net, "classification", dict_key_x=key).kron(x, y, N=BATCH)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return None


def table() -> str:
    """Return counts per package, and a table of all networks."""
    known = {(r["package"], r["name"]): r for r in results(RESULTS)}
    rows, counts = [], {}
    for run in runs():
        own = counts.setdefault(run.package, {"of": 0, "ours": 0, "stock": 0})
        own["of"] += 1
        found = known.get((run.package, run.name))
        if found is None:
            rows.append([run.package, run.name, "", "not run", "", "", ""])
            continue
        works = found["error"] is None
        own["ours"] += works
        own["stock"] += found["stock"] is None
        gradient = f"{found['gradient']:.1f}" if "gradient" in found else "no ranges" * works
        rows.append(
            [
                run.package,
                run.name,
                f"{found['n_parameters'] / 1e6:.1f}",
                f"{found['covered']} of {found['of']}",
                f"{found['kron']:.1f}" if "kron" in found else "",
                gradient if works else f"no: {found['error']}".replace("|", "/")[:110],
                "yes" if found["stock"] is None else "no",
            ]
        )
    words = [
        f"{package}: {n['ours']} of {n['of']} (stock laplace-torch {n['stock']})"
        for package, n in counts.items()
    ]
    header = ["package", "network", "million weights", "tensors covered", "kron, steps"]
    header += ["gradient of ranges, steps", "stock"]
    return "\n".join([*(f"- {line}" for line in words), "", bench.table(header, rows)])


def main() -> None:
    """Look at what has no result yet, and print or write the table."""
    arguments = options(__doc__, ()).parse_args()
    if not arguments.table:
        run_missing("bench_zoo", runs(), arguments.jobs)
    if not results(RESULTS):
        sys.exit("there is no result yet")
    print(table())
    if arguments.write:
        bench.write("zoo", table())


if __name__ == "__main__":
    main()

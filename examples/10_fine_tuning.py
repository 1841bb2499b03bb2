"""Fine-tune a network that was trained before, and learn which augmentation its images need.

A small network of torchvision is trained on upright digits of five classes, and its weights are
saved and loaded as those of torchvision or timm are: build the network, load the file, replace the
head. It is then fine-tuned on some hundred images of the other five classes, each rotated by up to
60 degrees, in four ways: without augmentation, with TrivialAugment, with ranges learnt by the
evidence of all weights, and with ranges learnt by that of the last layer alone. This takes about
two minutes.

    python examples/10_fine_tuning.py --data photos --size 64 --degrees 0 \
        --net resnet18 --weights resnet18.pth --out tuned

does the same with images and weights of one's own, left as they are.
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.models.regnet import BlockParams, RegNet
from torchvision.transforms import v2

import laplace_invariance as li
from laplace_invariance import datasets, plots
from laplace_invariance.layers import FixedStatistics, Standardise
from laplace_invariance.marglik import Search
from laplace_invariance.marglik.recipes import cosine_recipe

IMAGENET = Standardise([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
METHODS = {
    "none": "no augmentation",
    "trivial": "TrivialAugment",
    "all": "learnt, all weights",
    "last_layer": "learnt, last layer",
}
N_SHOWN = 8  # images in the picture


def arguments_of(words=None):
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default="digits", help="digits, an .npz file, or a folder")
    parser.add_argument("--pretrain", help="data to train on before; default: half of the classes")
    parser.add_argument("--weights", type=Path, help="state_dict of the network, trained before")
    parser.add_argument("--net", default="small", help="a network of torchvision.models")
    parser.add_argument("--degrees", type=float, default=60, help="by how much images are rotated")
    parser.add_argument("--size", type=int, default=16, help="height and width of all images")
    parser.add_argument("--train", type=int, help="number of images to fine-tune on, of all kinds")
    parser.add_argument("--test", type=int, help="number of images to test on, of all kinds")
    parser.add_argument(
        "--test-share", type=float, help="share to test on, if there is no test set"
    )
    parser.add_argument("--pretrain-epochs", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=30, help="epochs of fine-tuning")
    parser.add_argument("--samples", type=int, default=4, help="samples that are averaged over")
    parser.add_argument("--search-steps", type=int, default=10, help="steps of a candidate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fine_tuning"))
    return parser.parse_args(words)


# The network: built, loaded, and given a new head, as one does with weights of torchvision.


def build(name, n_classes):
    """Return a network of torchvision; "small" is a RegNet of two blocks, for small images."""
    if name == "small":
        blocks = BlockParams([1, 1], [32, 64], [16, 16], [1.0, 1.0], [2, 2])
        return RegNet(blocks, num_classes=n_classes, stem_width=16)
    return torchvision.models.get_model(name, num_classes=n_classes)


def head_of(net):
    """Return name and module of the last linear layer."""
    return [(name, m) for name, m in net.named_modules() if isinstance(m, nn.Linear)][-1]


def pretrained(name, weights, n_classes):
    """Load weights into a network, and replace its head by a new one."""
    state = torch.load(weights, weights_only=True)
    head, _ = head_of(build(name, 2))
    net = build(name, len(state[f"{head}.weight"]))
    net.load_state_dict(state)
    parent, _, last = head.rpartition(".")
    new = nn.Linear(net.get_submodule(head).in_features, n_classes)
    setattr(net.get_submodule(parent), last, new)
    # the statistics of batch norms stay: a few images have no better ones, and the evidence is
    # that of the network in evaluation mode
    return nn.Sequential(IMAGENET, FixedStatistics(net))


def pretrain(options, images, labels, path):
    """Train a network in the ordinary way, and save its weights."""
    torch.manual_seed(options.seed)
    net = build(options.net, int(labels.max()) + 1)
    model = nn.Sequential(IMAGENET, net).train()
    loader = DataLoader(TensorDataset(images, labels), 50, shuffle=True, drop_last=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(options.pretrain_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    torch.save(net.state_dict(), path)


# Images.


def rgb(images):
    """Return images with three channels, as networks of torchvision take them."""
    return images.expand(-1, 3, -1, -1).contiguous()


def of_classes(images, labels, first, last):
    """Return images of some classes, whose labels start at 0."""
    chosen = (labels >= first) & (labels < last)
    return images[chosen], labels[chosen] - first


def load(options):
    """Return images to train on before (None if there are weights), to train and to test on."""
    split = datasets.load(
        options.data,
        size=options.size,
        n_train=options.train,
        n_test=options.test,
        test_share=options.test_share,
        seed=options.seed,
    )
    before, first = None, 0
    if options.pretrain is not None:
        other = datasets.load(options.pretrain, size=options.size, n_train=options.train)
        before = (rgb(other.x_train), other.y_train)
    elif options.weights is None:
        first = split.n_classes // 2
        before = of_classes(rgb(split.x_train), split.y_train, 0, first)
    rotation = {"rotation": math.radians(options.degrees)}
    generator = torch.Generator().manual_seed(options.seed)
    parts = []
    for images, labels in ((split.x_train, split.y_train), (split.x_test, split.y_test)):
        images, labels = of_classes(rgb(images), labels, first, split.n_classes)
        parts.append((datasets.transformed(images, rotation, generator), labels))
    return before, *parts


class Trivial(Dataset):
    """Images, each through TrivialAugment whenever it is asked for."""

    def __init__(self, images, labels):
        self.images = (255 * images).round().to(torch.uint8)
        self.labels = labels
        self.transform = v2.TrivialAugmentWide()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.transform(self.images[i]).float() / 255, self.labels[i]


# Fine-tuning.


def fine_tune(method, net, train, options):
    """Fine-tune a network in one of four ways; return the model and its augmentation, if any.

    All weights follow the training loss in all of them, and their priors the evidence. What differs
    is what happens to images, and which evidence learns ranges.
    """
    torch.manual_seed(options.seed)
    plain = TensorDataset(*train)
    shown = Trivial(*train) if method == "trivial" else plain
    loader = DataLoader(shown, 50, shuffle=True)
    settings = dict(cosine_recipe(options.epochs, len(loader), lr=3e-3))
    settings["marglik_loader"] = DataLoader(plain, 250)
    if method in ("none", "trivial"):
        # the evidence is that of images as they are, which "running" would not see
        settings["estimator"] = "refit" if method == "trivial" else "running"
        return li.marglik_training(net, loader, **settings).model, None
    augmentation = li.AffineImage()
    model = li.InvariantModel(net, augmentation, options.samples)
    search = None  # the gradient of the evidence of all weights opens ranges from zero
    if method == "last_layer":  # features would adapt before its gradient opens any
        search = Search(n_steps=options.search_steps, keep=2, n_rounds=1)
    li.marglik_training(model, loader, subset_of_weights=method, search=search, **settings)
    return model, augmentation


@torch.no_grad()
def accuracy(model, images, labels):
    """Return the share of images that are classified correctly."""
    model.eval()
    outputs = torch.cat([model(x) for x in images.split(250)])
    return (outputs.argmax(-1) == labels).double().mean().item()


def measured(method, model, augmentation, train, test, seconds):
    """Return everything that is known of a result, for JSON.

    Evidences are exact, and of the same number of samples: a network without augmentation is its
    own average over any number.
    """
    loader = DataLoader(TensorDataset(*train), 250)
    found = {"method": method, "accuracy": accuracy(model, *test), "seconds": seconds}
    for subset in ("all", "last_layer"):
        evidence = li.log_evidence(model, loader, subset_of_weights=subset)
        found[f"evidence_{subset}"] = evidence / len(train[1])
    found["magnitudes"] = {} if augmentation is None else augmentation.magnitudes()
    shape = tuple(train[0].shape[1:])
    found["ranges"] = {} if augmentation is None else augmentation.ranges(shape)
    return found


def exported(augmentation, path):
    """Save an augmentation, and return the transform of torchvision that the file makes."""
    torch.save(augmentation.state_dict(), path)
    again = li.AffineImage()
    again.load_state_dict(torch.load(path, weights_only=True))
    assert again.magnitudes() == augmentation.magnitudes()
    return again.to_transform()


# What is shown.


def words_of(ranges, magnitudes):
    """Return the ranges that are open, in words."""
    shown = [
        f"{name} {ranges[name]}".replace("_", " ") for name in ranges if magnitudes[name] > 0.05
    ]
    return "; ".join(shown) or "-"


def table(results):
    """Return results as a table in Markdown."""
    lines = ["| | accuracy | evidence, all weights | evidence, last layer | ranges | seconds |"]
    lines.append("|---|---|---|---|---|---|")
    for found in results:
        cells = [
            METHODS[found["method"]],
            f"{100 * found['accuracy']:.1f} %",
            f"{found['evidence_all']:.3f}",
            f"{found['evidence_last_layer']:.3f}",
            words_of(found["ranges"], found["magnitudes"]),
            f"{found['seconds']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(images, transforms, path):
    """Draw images, and the same through each exported transform."""
    rows = {"images": images} | {
        METHODS[name]: torch.stack([transform(image) for image in images])
        for name, transform in transforms.items()
    }
    figure = plots.figure((N_SHOWN, 1.3 * len(rows)))
    axes = figure.subplots(len(rows), N_SHOWN)
    for row, (name, shown) in zip(axes, rows.items(), strict=True):
        row[0].set_title(name, loc="left", fontsize="small")
        for ax, image in zip(row, shown, strict=False):
            ax.imshow(image.permute(1, 2, 0).clamp(0, 1))
            ax.axis("off")
    figure.savefig(path, dpi=120)


def conclusion(results):
    """Return in one line whether the rotation is found, and what was learnt helps."""
    by_method = {found["method"]: found for found in results}
    degrees = math.degrees(by_method["all"]["magnitudes"]["rotation"])
    none = by_method["none"]["accuracy"]
    helps = all(by_method[name]["accuracy"] > none for name in ("all", "last_layer"))
    return (
        f"all weights learn a rotation beyond 20 degrees: {degrees > 20}; "
        f"both ways are more accurate than none: {helps}"
    )


def main(words=None):
    """Pretrain if need be, fine-tune in four ways, and show what came out."""
    options = arguments_of(words)
    options.out.mkdir(parents=True, exist_ok=True)
    before, train, test = load(options)
    weights = options.weights
    if weights is None:
        weights = options.out / "pretrained.pt"
        pretrain(options, *before, weights)
    torch.manual_seed(options.seed)
    start = pretrained(options.net, weights, int(train[1].max()) + 1)
    print(f"{len(train[1])} images to fine-tune on, {len(test[1])} to test on", flush=True)
    results, transforms = [], {}
    for method in METHODS:
        started = time.process_time()
        model, augmentation = fine_tune(method, copy.deepcopy(start), train, options)
        seconds = time.process_time() - started
        results.append(measured(method, model, augmentation, train, test, seconds))
        print(f"{METHODS[method]}: {results[-1]['accuracy']:.1%}, {seconds:.0f} s", flush=True)
        if augmentation is not None:
            transforms[method] = exported(augmentation, options.out / f"{method}.pt")
    draw(train[0][:N_SHOWN], transforms, options.out / "fine_tuning.png")
    record = {
        "data": Path(options.data).stem,
        "pretrained_on": Path(options.weights or options.pretrain or "other classes").stem,
        "net": options.net,
        "degrees": options.degrees,
        "n_epochs": options.epochs,
        "n_samples": options.samples,
        "seed": options.seed,
        "n_train": len(train[1]),
        "n_test": len(test[1]),
        "results": results,
    }
    (options.out / "results.json").write_text(json.dumps(record, indent=2) + "\n")
    print(table(results))
    print(conclusion(results))


if __name__ == "__main__":
    main()

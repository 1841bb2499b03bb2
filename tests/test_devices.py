"""What a GPU needs: all tensors on one device, and a host that does not wait for it in loops."""

import math
import threading
from copy import deepcopy

import pytest
import torch
from builders import labelled_points, plain_network, training_settings
from cases import COMPOSED, WITH_RULES, name_of
from device import DEVICE, Device, on_cpu
from torch import nn
from torch.utils.data import DataLoader
from twins import relative_error

import laplace_invariance as li
from laplace_invariance import augmentations, curvature, layers
from laplace_invariance.augmentations.affine import matrix_exponential
from laplace_invariance.curvature import AugmentedGGN, TangentKernelBound, kfac
from laplace_invariance.hyper import differentiable
from laplace_invariance.marglik import MAP, Augerino, Running
from laplace_invariance.marglik.loop import Trainer

IMAGES, CLASSES, N = (5, 3, 6, 6), 3, 23


@pytest.fixture
def device():
    with Device() as device:
        yield device


def assert_same(found, expected):
    """Raise unless tensors on the device are those that were computed on the CPU."""
    assert found.device == DEVICE
    torch.testing.assert_close(on_cpu(found.detach()), expected.detach())


# The device itself: what it would let pass, it must refuse.


def test_tensors_of_two_devices_cannot_meet(device):
    there, here = device.put(torch.rand(3)), torch.rand(3)
    for mix in (torch.add, torch.dot, lambda x, y: torch.cat([x, y]), lambda x, y: x.lerp_(y, 0.5)):
        with pytest.raises(RuntimeError, match="of the CPU and of the device"):
            mix(there, here)
    assert_same(there * torch.tensor(2.0), 2 * on_cpu(there))  # as a GPU allows it


def test_waiting_is_counted_and_nothing_else_is(device):
    x = device.put(torch.rand(3, 2))
    waiting = [
        lambda: x.sum().item(),
        lambda: bool((x > 0).all()),
        lambda: x.nonzero(),
        lambda: x[x > 0.5],
        lambda: x[[0, 2]],
        lambda: x.cpu(),
        lambda: x.tolist(),
        lambda: torch.equal(x, x),
        lambda: torch.allclose(x, x),
        lambda: torch.rand(3).to(DEVICE),
        lambda: x.new_tensor([1.0]),
        lambda: torch.tensor([1.0], device=DEVICE),
        lambda: x[0].copy_(torch.rand(2)),
        lambda: torch.linalg.solve(x.mT @ x, x.mT),
    ]
    for i, wait in enumerate(waiting):
        device.waits.clear()
        wait()
        assert device.waits.total() == 1, i
    device.waits.clear()
    (x @ x.mT).softmax(-1).sum()
    torch.arange(3, device=DEVICE)
    x[:, 1:] = 0
    torch.rand(3).to(DEVICE, non_blocking=True)
    torch.rand(3).sum().item()
    assert not device.waits


# Augmentations.

AUGMENTATIONS = {
    "image": (lambda: li.AffineImage(init=0.2), IMAGES),
    "tanh": (lambda: li.AffineImage(init=0.2, constraint="tanh", correlated=True), IMAGES),
    "softplus": (lambda: li.AffineImage(init=0.2, constraint="softplus"), IMAGES),
    "grid": (lambda: li.AffineImage(init=0.2, learn="rotation", draws="grid"), IMAGES),
    "independent": (lambda: li.AffineImage(init=0.2, draws="independent"), IMAGES),
    "points": (lambda: li.AffinePoints(3, init=0.2), (5, 7, 3)),
    "colour": (lambda: li.Colour(init=[0.3, -0.4, 0.5]), IMAGES),
    "signal": (lambda: li.Sequence(init=0.3), (5, 3, 11)),
    "circular": (lambda: li.Sequence(init=0.3, padding="circular"), (5, 3, 11)),
    "composed": (lambda: li.Compose(li.Colour(init=0.1), li.AffineImage(init=0.2)), IMAGES),
    "finite": (lambda: li.FiniteGroup(init=0.3), IMAGES),
}
ABSTRACT = {"Augmentation", "BoxAugmentation", "LieGroup"}


def test_every_augmentation_is_tested():
    tested = {type(make()).__name__ for make, _ in AUGMENTATIONS.values()}
    assert tested == set(augmentations.__all__) - ABSTRACT


def transformed(augmentation, x, draws):
    """Samples, and the gradients of something in them with respect to ranges."""
    with differentiable():
        weights = augmentation.weights(draws.shape[1]).view(-1, *[1] * (x.ndim - 1))
        samples = augmentation.transform(x, draws)
        loss = (weights * samples.sin()).sum()
        return samples, *torch.autograd.grad(loss, list(li.hyperparameters(augmentation)))


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentations_stay_on_the_device_and_never_wait(device, name):
    make, shape = AUGMENTATIONS[name]
    augmentation, x = make(), torch.rand(shape)
    n_samples = 3 if name == "points" else 4  # powers of two are drawn in another way
    fixed = augmentation.fixed(n_samples)
    generator = torch.Generator().manual_seed(3)
    draws = augmentation.sample(len(x), n_samples, generator)
    expected = transformed(augmentation, x, draws)
    there, x_there = device.put(deepcopy(augmentation)), device.put(x)
    for _ in range(2):  # what is kept on the device is there from the second time on
        device.waits.clear()
        assert_same(there.fixed(n_samples), fixed)
        generator.manual_seed(3)
        found = there.sample(len(x), n_samples, generator)
        assert_same(found, draws)
        for own, other in zip(transformed(there, x_there, found), expected, strict=True):
            assert_same(own, other)
        transformed(there, x_there, there.sample(len(x), n_samples))
        there.project_()
    assert not device.waits


@pytest.mark.parametrize("norm", [0.0, 1e-3, 0.4, 3.0, 50.0, 127.0])
def test_exponentials_need_no_norm(device, norm):
    matrices = torch.randn(5, 2, 3, 3)
    matrices = norm * (matrices - matrices.mT) / (matrices - matrices.mT).abs().sum(-1).amax()
    matrices[0] *= 1e-3  # each has its own number of squarings
    found = matrix_exponential(device.put(matrices))
    assert not device.waits
    assert relative_error(on_cpu(found), torch.linalg.matrix_exp(matrices)) < 1e-12


# Layers.


class Head(nn.Module):
    """A linear layer behind anything."""

    def __init__(self, layer, n_features):
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(n_features, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x).flatten(1).sin())


def with_head(make, shape):
    layer = make()
    x = torch.randint(11, (5, *shape[1:]))
    if not isinstance(layer, nn.Embedding):
        x = torch.randn(5, *shape[1:])
    with torch.no_grad():
        return Head(layer, layer(x)[0].numel()), x


IMAGE = (1, 3, 8, 8)
FEATURES = (1, 3, 4, 8, 8)
FURTHER = [
    (lambda: layers.PolyphasePool2d(2), IMAGE),
    (lambda: layers.GroupPool("max"), FEATURES),
    (lambda: layers.OnGroup(nn.Conv2d(12, 8, 3, padding=1), 4), FEATURES),
    (lambda: layers.Standardise([0.1, 0.2, 0.3], [1.0, 2.0, 3.0]), IMAGE),
    (lambda: layers.FixupResNet(3, 5, depth=8, width=2), (1, 3, 4, 4)),
    (lambda: layers.cnn((3, 8, 8), 5, width=2), IMAGE),
    (lambda: layers.mlp((3,), 5, width=7), (1, 3)),
    (lambda: layers.FixedStatistics(nn.BatchNorm2d(3)), IMAGE),
]
EVERY_LAYER = [*WITH_RULES, *COMPOSED, *FURTHER]


def test_every_layer_is_tested():
    exported = [getattr(layers, name) for name in layers.__all__]
    modules = {kind for kind in exported if isinstance(kind, type) and issubclass(kind, nn.Module)}
    tested = {type(module) for make, _ in EVERY_LAYER for module in make().modules()}
    missing = {kind for kind in modules if not any(issubclass(own, kind) for own in tested)}
    assert not missing


def trained_on(model, y, structure="kron", **options):
    """Return the function that computes loss and curvature of inputs, as a list."""
    backend = AugmentedGGN(model, "classification", **options)

    def evaluate(x):
        keywords = {"N": N} if structure == "kron" else {}
        loss, found = getattr(backend, structure)(x, y, **keywords)
        tensors = [f for own in found.kfacs for f in own] if structure == "kron" else [found]
        return [loss, *tensors]

    return evaluate


@pytest.mark.parametrize(("make", "shape"), EVERY_LAYER, ids=name_of)
def test_layers_stay_on_the_device_and_never_wait(device, make, shape):
    model, x = with_head(make, shape)
    model.eval()
    y = torch.arange(5) % CLASSES
    expected = trained_on(model, y)(x)
    gradients = torch.autograd.grad(model(x).sin().sum(), list(model.parameters()))
    there, x_there = device.put(deepcopy(model)), device.put(x)
    evaluate = trained_on(there, device.put(y))
    evaluate(x_there)  # the first batch is looked at
    device.waits.clear()
    for own, other in zip(evaluate(x_there), expected, strict=True):
        assert_same(own, other)
    found = torch.autograd.grad(there(x_there).sin().sum(), list(there.parameters()))
    for own, other in zip(found, gradients, strict=True):
        assert_same(own, other)
    for module in there.modules():
        if isinstance(module, li.Hyperparameterised):
            with torch.no_grad():
                module.project_()
    assert not device.waits


# Backends.

ENGINES = ("", "BackPack", "Asdl")


def averaged(**options):
    """A network for images that is averaged over draws of a generator on the CPU."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)
    )
    generator = torch.Generator().manual_seed(1)
    return li.InvariantModel(net, li.AffineImage(init=0.2, **options), 2, generator)


def moved(device, model):
    """A copy on the device that will draw the same."""
    generator, model.generator = model.generator, None
    copied = deepcopy(model)
    model.generator = generator
    copied.generator = torch.Generator().manual_seed(1)
    return device.put(copied)


def labels(likelihood):
    if likelihood == "classification":
        return torch.arange(IMAGES[0]) % CLASSES
    return torch.randn(IMAGES[0], CLASSES)


def evidence_like(structure, loss, found):
    if structure == "kron":
        found = (found.decompose() + found.kfacs[0][0].new_ones(len(found))).logdet()
    return loss + found.sin().sum()


def fitted(backend, structure, batches):
    """Something made of loss and curvature of all batches, as ``fit`` and the evidence do it."""
    keywords = {"N": N} if structure == "kron" else {}
    total = None
    for x, y in batches:
        loss, found = getattr(backend, structure)(x, y, **keywords)
        total = (loss, found) if total is None else (total[0] + loss, total[1] + found)
    return total


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("kind", ["GGN", "EF"])
@pytest.mark.parametrize("engine", ENGINES)
def test_backends_stay_on_the_device_and_wait_once_per_pass(device, engine, kind, structure):
    backend = getattr(curvature, f"{engine}Augmented{kind}")
    likelihood = "classification" if kind == "GGN" else "regression"
    model, y = averaged(), labels(likelihood)
    batches = [(torch.rand(IMAGES), y) for _ in range(2)]
    expected = evidence_like(structure, *fitted(backend(model, likelihood), structure, batches))
    (gradient,) = torch.autograd.grad(expected, list(li.hyperparameters(model)))

    there = moved(device, model)
    placed = [(device.put(x), device.put(y)) for x, y in batches]
    there_backend = backend(there, likelihood)
    there_backend._prepare(placed[0][0])  # layers are verified on the first batch
    device.waits.clear()
    loss, found = fitted(there_backend, structure, placed)
    assert not device.waits
    value = evidence_like(structure, loss, found)
    device.waits.clear()
    (own,) = torch.autograd.grad(value, list(li.hyperparameters(there)))
    assert device.waits.total() == 1, device.waits  # are the weights still the same?
    assert_same(value, expected)
    assert_same(own, gradient)


OPTIONS = {
    "random columns": {"stochastic": True},
    "in parts": {"chunk_size": 1},
    "reduced": {"kfac_approx": "reduce"},
    "leading columns": {"output_rank": 1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_do_not_wait_either(device, options):
    model = moved(device, averaged())
    x, y = device.put(torch.rand(IMAGES)[:2]), device.put(labels("classification")[:2])
    backend = AugmentedGGN(model, "classification", **options)
    backend.kron(x, y, N=N)
    device.waits.clear()
    loss, found = backend.kron(x, y, N=N)
    cotangents = [torch.ones_like(tensor) for own in found.kfacs for tensor in own]
    _, gradients = backend.pull_back("kron", x, y, N, [torch.ones_like(loss), *cotangents])
    if "chunk_size" not in options:
        backend.jacobians(x)
        backend.gradients(x, y)
    with torch.no_grad():
        model(x)
    assert all(gradient.device == DEVICE for gradient in gradients)
    # one small decomposition per pass, as torch looks whether it succeeded
    expected = {"curvature/loss_hessian.py": 2} if "output_rank" in options else {}
    assert {place.partition(":")[0]: n for place, n in device.waits.items()} == expected


class Tokens(nn.Module):
    """Parameters outside of layers: a token, positions, a table that is gathered from, a scale."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(1, 6, 4))
        self.table = nn.Parameter(torch.randn(7))
        self.scale = nn.Parameter(torch.randn(4))
        self.project = nn.Parameter(torch.randn(5, 4))
        self.register_buffer("places", torch.arange(36).view(6, 6) % 7)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        scores = x @ x.mT + self.table[self.places]
        x = self.scale * (scores.softmax(-1) @ x)
        return self.head(nn.functional.linear(x, self.project).tanh().mean(1))


def test_parameters_outside_of_layers_are_looked_at_once(device):
    model, x, y = Tokens(), torch.randn(5, 5, 4), torch.arange(5) % CLASSES
    expected = trained_on(model, y)(x)
    evaluate = trained_on(device.put(deepcopy(model)), device.put(y))
    for _ in range(2):
        device.waits.clear()
        found = evaluate(device.put(x))
    assert not device.waits
    for own, other in zip(found, expected, strict=True):
        assert_same(own, other)


@pytest.mark.parametrize("kind", ["full", "output", "single"])
def test_the_tangent_kernel_waits_for_its_decomposition_only(device, kind):
    model, x = averaged(), torch.rand(IMAGES)
    precision = torch.ones(len(list(model.parameters())))
    expected = TangentKernelBound(model, "classification", kind).log_determinant(
        x, precision, column=1
    )
    model = moved(device, model)
    bound = TangentKernelBound(model, "classification", kind)
    x, precision = device.put(x), device.put(precision)
    bound.log_determinant(x, precision)
    model.generator.manual_seed(1)
    device.waits.clear()
    assert_same(bound.log_determinant(x, precision, column=1), expected)
    assert {place.partition(":")[0] for place in device.waits} == {"curvature/kernels.py"}
    assert device.waits.total() == 1


@pytest.mark.parametrize("changed_before", ["all batches", "the last batch"])
def test_changed_weights_are_found_out_on_the_device(device, changed_before):
    model = moved(device, averaged())
    x, y = device.put(torch.rand(IMAGES)), device.put(labels("classification"))
    backend = AugmentedGGN(model, "classification")
    first, _ = backend.diag(x, y)
    if changed_before == "the last batch":
        next(model.parameters()).data.add_(1.0)
        last, _ = backend.diag(x, y)
        (first + last).backward()
        assert on_cpu(model.augmentation.eta.grad).isnan().all()
    else:
        next(model.parameters()).data.add_(1.0)
        with pytest.raises(RuntimeError, match="weights changed"):
            first.backward()


@pytest.mark.parametrize("changed_before", ["all batches", "the last batch"])
def test_changed_inputs_are_found_out_on_the_device(device, changed_before):
    model = moved(device, averaged())
    x, y = device.put(torch.rand(IMAGES)), device.put(labels("classification"))
    backend = AugmentedGGN(model, "classification")
    first, _ = backend.diag(x, y)
    x.mul_(2)
    if changed_before == "the last batch":  # as by a loader that fills one buffer again
        last, _ = backend.diag(x, y)
        (first + last).backward()
        assert on_cpu(model.augmentation.eta.grad).isnan().all()
    else:
        with pytest.raises(RuntimeError, match="inputs changed"):
            first.backward()


def test_gradients_do_not_depend_on_the_thread():
    # where there is a GPU, backward passes run in threads of their own, with contexts of their own
    model, y = averaged(), labels("classification")
    batches = [(torch.rand(IMAGES), y) for _ in range(2)]
    found = []
    for run in (lambda work: work(), in_thread):
        model.generator.manual_seed(1)
        model.augmentation.eta.grad = None
        backend = AugmentedGGN(model, "classification")
        value = evidence_like("kron", *fitted(backend, "kron", batches))
        run(value.backward)
        found.append(model.augmentation.eta.grad)
    torch.testing.assert_close(*found)


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_large_products_are_one_product_on_the_device(device):
    x = torch.randn(150, 600)
    there = device.put(x)
    device.operations.clear()
    found = kfac.symmetric_product(there, there)
    assert device.operations["mm"] == 1
    assert_same(found, x.mT @ x)
    device.operations.clear()
    kfac.symmetric_product(x, x)
    assert device.operations["mm"] > 1


# Training.


def trainer_on(device, **options):
    """A trainer with a model on the device, whose loader is on the CPU."""
    model = li.InvariantModel(plain_network(), li.AffinePoints(init=0.2, learn="rotation"), 3)
    loader = DataLoader(labelled_points(n=16), batch_size=6)
    settings = training_settings(loader, n_epochs=4, lr_aug=0.01, **options)
    return Trainer(device.put(model), settings), loader


@pytest.mark.parametrize("objective", [MAP(), Augerino()], ids=["weights", "ranges"])
def test_a_training_step_waits_once(device, objective):
    trainer, loader = trainer_on(device, objective=objective)
    trainer.train_on(loader)
    device.waits.clear()
    loss = trainer.train_on(loader)
    assert math.isfinite(loss)
    assert device.waits.total() == len(loader) + 1  # steps, and the losses of all of them
    assert {place.partition(":")[0] for place in device.waits} == {"hyper.py", "marglik/loop.py"}


def test_a_step_on_ranges_waits_once(device):
    trainer, loader = trainer_on(device, estimator=Running(every=1, settle=0.0))
    for _ in range(2):
        trainer.epoch += 1
        trainer.train_on(loader)
        trainer.estimator.estimate(trainer.epoch)
    device.waits.clear()
    trainer.epoch += 1
    trainer.train_on(loader)
    assert device.waits.total() == 2 * len(loader) + 1  # steps of ranges and of weights


def test_a_step_that_is_not_finite_is_skipped(device):
    trainer, loader = trainer_on(device, objective=MAP())
    before = [on_cpu(p.detach()).clone() for p in trainer.model.parameters()]
    batches = [(x * math.nan, y) for x, y in loader]
    assert math.isnan(trainer.train_on(batches[:2]))
    assert trainer.guard.skipped["weights"] == 2
    for own, other in zip(trainer.model.parameters(), before, strict=True):
        assert_same(own, other)

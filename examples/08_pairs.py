"""Learn a code that ignores transformations of which nothing is known, from pairs.

The data are vectors of eight numbers, shifted along a cycle through their entries that is
hidden from the network. For each pair of vectors it is given only how far apart they are: zero
if one is the other, shifted. A part of its code learns to ignore the shift, the rest learns by
how much the vector was shifted, so that both together reconstruct it. This takes about half a
minute; the figure is written to demo/.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import trange

from laplace_invariance import plots
from laplace_invariance.autoencoder import InvariantAutoencoder, inverse_distance_loss, network
from laplace_invariance.datasets import HiddenShifts

FEATURES = 8  # entries of a vector
WIDTH = 64  # linear units per layer
STEPS = 4000
BATCH = 128

torch.manual_seed(0)
hidden = HiddenShifts(FEATURES, order=torch.randperm(FEATURES))
model = InvariantAutoencoder(
    encoder=network("rich", FEATURES, 3 * FEATURES, depth=1, width=WIDTH),
    decoder=network("rich", 3 * FEATURES, FEATURES, depth=1, width=WIDTH),
    n_invariant=FEATURES,
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
for _ in trange(STEPS):
    x, other, distance = hidden.pairs(BATCH)
    both = torch.cat([x, other])
    reconstruction, codes = model(both)
    code_loss = inverse_distance_loss(*codes.invariant.chunk(2), distance)
    loss = F.mse_loss(reconstruction, both) + 8 * code_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()

with torch.no_grad():
    x = hidden.pairs(2000)[0]
    reconstruction, codes = model(x)
    shifted = hidden.shifted(x, torch.randint(FEATURES, (len(x), 1)))
    same = F.mse_loss(codes.invariant, model.encode(shifted).invariant)
    different = F.mse_loss(codes.invariant, codes.invariant.roll(1, 0))
    orbit = model.encode(hidden.orbit(x[0]))

figure = plots.figure((10, 4))
for part, values, ax in zip(("invariant", "variant"), orbit, figure.subplots(1, 2), strict=True):
    plots.orbit_codes(values, ax).set_title(f"{part} code of one vector")
path = Path("demo", "pairs.png")
path.parent.mkdir(exist_ok=True)
figure.savefig(path, dpi=120)

error = F.mse_loss(reconstruction, x)
print(f"hidden cycle {hidden.order.tolist()}, error of the reconstruction {error:.1e}")
print(
    f"squared differences of invariant codes: {same:.1e} if shifted, "
    f"{different:.1e} between different vectors"
)
much_less = (different > 100 * same).item()
print(
    f"a shift changes the invariant code a hundred times less than another vector does: {much_less}"
)

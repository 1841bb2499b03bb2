"""Part (c): fits that are differentiable in hyperparameters of the backend."""

from pathlib import Path

from edits import Edit, Part

BASE = "laplace/baselaplace.py"
MATRIX = "laplace/utils/matrix.py"

PART = Part(
    Path(__file__).parent,
    edits=(
        Edit(
            MATRIX,
            '            raise ValueError("Can only add Kron to Kron.")\n',
            '            raise ValueError("Can only add Kron to Kron.")\n\n'
            "        # What a backend returns stays what it is, also if it is added to the zeros\n"
            "        # that a fit starts from: a subclass knows how to add.\n"
            "        if type(other) is not type(self) and isinstance(other, type(self)):\n"
            "            return other + self\n",
        ),
        Edit(
            MATRIX,
            "            for Fi, Fj in zip(self.kfacs, other.kfacs)\n        ]\n\n"
            "        return Kron(kfacs)\n",
            "            for Fi, Fj in zip(self.kfacs, other.kfacs)\n        ]\n\n"
            "        return type(self)(kfacs)\n",
        ),
        Edit(
            BASE,
            "                neg_log_marglik.backward()\n",
            "                # Only the prior is optimized. Curvature that depends on\n"
            "                # hyperparameters of the backend is left alone, since its graph\n"
            "                # could be passed through once only.\n"
            "                neg_log_marglik.backward(inputs=[log_prior_prec])\n",
        ),
        Edit(
            "laplace/marglik_training.py",
            "        for _ in range(n_hypersteps):\n            hyper_optimizer.zero_grad()\n",
            "        for step in range(n_hypersteps):\n            hyper_optimizer.zero_grad()\n",
        ),
        Edit(
            "laplace/marglik_training.py",
            "            marglik.backward()\n",
            "            # The first step passes through the curvature, to hyperparameters of the\n"
            "            # backend; its graph is gone after that.\n"
            "            marglik.backward(inputs=hyperparameters if step else None)\n",
        ),
        Edit(
            BASE,
            '        """Fit the local Laplace approximation at the parameters of the model.\n\n'
            "        Parameters\n        ----------\n        train_loader : "
            "torch.data.utils.DataLoader\n            each iterate is a training batch, "
            "either `(X, y)` tensors or a dict-like\n",
            '        """Fit the local Laplace approximation at the parameters of the model.\n\n'
            "        If loss and curvature that the backend returns are differentiable in\n"
            "        hyperparameters of its own, so is `log_marginal_likelihood` afterwards.\n\n"
            "        Parameters\n        ----------\n        train_loader : "
            "torch.data.utils.DataLoader\n            each iterate is a training batch, "
            "either `(X, y)` tensors or a dict-like\n",
        ),
    ),
)

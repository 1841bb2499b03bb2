"""Invariant weights: a shallow network whose first layer is transformed, learnt by an ELBO.

``f(x) = scale W2 mean_s phi(W1 T_s x + b)`` with transformations ``T_s`` of ranges ``eta``. Since
``W1 (T x) = (W1 T) x``, not inputs but the rows of ``W1`` are transformed, once for a whole batch.
The last layer has a Gaussian prior ``N(0, I)`` and for every output a Gaussian ``q`` with full
covariance, so that the lower bound on the evidence

    log p(y) >= E_q[log p(y | f)] - KL(q || prior)     (ELBO)

can be maximised over ``q`` *and* over ``eta``: van der Ouderaa and van der Wilk, *Learning
Invariant Weights in Neural Networks* (2022). The likelihood of a point estimate, without the KL, is
there to compare with.
"""

from laplace_invariance.variational.network import ACTIVATIONS, ShallowNetwork
from laplace_invariance.variational.training import OBJECTIVES, fit

__all__ = ["ACTIVATIONS", "OBJECTIVES", "ShallowNetwork", "fit"]

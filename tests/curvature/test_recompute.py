"""A batch as one node of the graph, which computes again what it needs."""

import torch

from laplace_invariance.curvature.recompute import pull_back_through, recomputed


def test_gradients_exist_where_outputs_depend_on_inputs():
    x, other, constant = torch.ones(2, requires_grad=True), torch.ones(3), torch.ones(2)
    other.requires_grad_()
    outputs, cotangents = [3 * x, None, constant], [torch.ones(2), None, torch.ones(2)]
    gradient, *rest = pull_back_through(outputs, cotangents, [x, other, constant])
    torch.testing.assert_close(gradient, torch.full((2,), 3.0))
    assert rest == [None, None]
    assert pull_back_through([constant], [torch.ones(2)], [x]) == [None]
    assert pull_back_through([3 * x], [torch.ones(2)], [constant]) == [None]
    assert pull_back_through([3 * x], [None], [x]) == [None]


def test_what_is_evaluated_stays_as_it_was():
    x, kept = torch.ones(2, requires_grad=True), torch.ones(2)
    result, nothing = recomputed(lambda: [kept, None], lambda cotangents: [5 * cotangents[0]], [x])
    assert nothing is None
    assert not kept.requires_grad
    for times in (1, 2):  # as often as is asked for
        result.sum().backward(retain_graph=True)
        torch.testing.assert_close(x.grad, torch.full((2,), 5.0 * times))

"""Requests for mixes, and their deltas in a manager's first linears."""

from itertools import count

import torch

from outrider.platform.core.lora_request import LoRARequest, mix_of
from outrider.platform.core.request import Request
from outrider.platform.core.sampling_params import SamplingParams

_orders = count(10**6)


def mixed_request(*parts, request_id="mix"):
    """A request for (name, path, weight) each."""
    lora = mix_of([(LoRARequest(name, path=path), weight) for name, path, weight in parts])
    order = (0, next(_orders))
    return Request(request_id, [1, 2, 3], 3, SamplingParams(), seed_key=0, lora=lora, order=order)


def admit(manager, request):
    """A new request, until it runs."""
    manager.resolve(request)
    return wait_for(manager, request)


def wait_for(manager, request):
    for _ in range(50):
        reason = manager.admit(request)
        if reason is None:
            return request
        manager.wait(10)
    raise AssertionError(reason)


def added_by(manager, request, site=0):
    """Delta of a linear for ones of a request's token, and none for a base token after it."""
    linear = manager.linears[site]
    x = torch.ones(2, linear.in_features)
    y = torch.zeros(2, sum(size for _, size in linear.slices))
    linear.lora.add(y, x, manager.prepare([(request.adapter, 1), (None, 1)]))
    assert not y[1].any()
    return y[0]

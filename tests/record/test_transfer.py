"""Scalars arrive exactly as they were, whatever their dtypes, in one copy."""

import math

import pytest
import torch

from hookline.record.transfer import Transfer


def test_mixed_dtypes_keep_order_and_type() -> None:
    """Numbers of all dtypes come back in their order: ints as ints, booleans as bools, floats exactly."""
    scalars = [
        torch.tensor(True),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(2**62 + 1),
        torch.tensor(-3, dtype=torch.int8),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor(0.1, dtype=torch.float32),
        torch.tensor(False),
        torch.tensor(7, dtype=torch.int16),
        torch.tensor(65504.0, dtype=torch.float16),
        torch.tensor(200, dtype=torch.uint8),
        torch.tensor(0.5).to(torch.float8_e4m3fn),
    ]
    numbers = Transfer(scalars).numbers()
    assert numbers == [scalar.item() for scalar in scalars]
    assert [type(number) for number in numbers] == [type(scalar.item()) for scalar in scalars]


def test_non_finite_numbers_arrive() -> None:
    """NaN and both infinities survive the trip."""
    numbers = Transfer([torch.tensor(v) for v in (math.nan, math.inf, -math.inf)]).numbers()
    assert math.isnan(numbers[0])
    assert numbers[1:] == [math.inf, -math.inf]


def test_on_the_cpu_it_has_arrived_at_once() -> None:
    """There is nothing to wait for without a device."""
    assert Transfer([torch.tensor(1.0)]).has_arrived()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_never_waited_for() -> None:
    """While the device is busy the copy is on its way; afterwards the numbers are right."""
    device = torch.device("cuda")
    scalars = [torch.tensor(1.5, device=device), torch.tensor(7, device=device)]
    Transfer(scalars).numbers()  # the first use loads kernels and pins memory, which waits
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    transfer = Transfer(scalars)
    assert not transfer.has_arrived()
    assert transfer.numbers() == [1.5, 7]
    assert transfer.has_arrived()

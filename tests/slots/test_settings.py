"""The text of a slot object tells its settings."""

from dataclasses import dataclass

import pytest
import torch

from deepinfer.slots.attention import CSA2
from deepinfer.slots.experts import Local
from deepinfer.slots.verifier import BaseVerifier, Fixed


@pytest.mark.parametrize("base", [CSA2, Local, BaseVerifier])
def test_own_settings_are_shown(base):
    class Stride(base):
        def __init__(self, stride=1, *, hidden=3, plan=None, **more):
            super().__init__()
            self.stride, self._hidden = stride, hidden

    assert repr(Stride()) == "Stride()" and repr(Stride(2, hidden=5)) == "Stride(stride=2)"
    assert repr(Stride(None)) == "Stride(stride=None)" and repr(Stride(True)) != repr(Stride(1))
    held = repr(Stride(torch.arange(1000.0).view(10, 100)))
    assert held.startswith("Stride(stride=tensor") and "\n" not in held and len(held) < 80
    assert repr(Stride(len)) == "Stride(stride=len)" and " at 0x" not in repr(Stride(object()))

    class Needs(base):
        def __init__(self, stride):
            self.stride = stride

    assert repr(Needs(2)) == "Needs(stride=2)"
    assert repr(Needs.__new__(Needs)) == "Needs()"


def test_present_forms_stay():
    class Half(CSA2):
        def __init__(self, share):
            super().__init__(topk=share * 2)

    @dataclass(eq=False)
    class Field(Local):
        keep: int = 3

    assert repr(CSA2()) == "CSA2()" and repr(CSA2(topk=4)) == "CSA2(topk=4)"
    assert repr(Half(2)) == "Half(topk=4)" and repr(Fixed(3)) == "Fixed(3)"
    assert repr(Local()) == "Local()" and repr(BaseVerifier()) == "BaseVerifier()"
    assert repr(Field(4)).endswith("Field(keep=4)")

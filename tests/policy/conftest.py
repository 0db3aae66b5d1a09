"""Tests of the CPU kernels need them: without a C++ compiler they are skipped, and the forward runs on XLA's own code."""

import pytest

from postrl.policy import ops


@pytest.fixture(scope="session")
def kernels():
    if not ops.has_kernels():
        pytest.skip("the CPU kernels can't be built on this machine: see the warning of postrl.policy.ops.has_kernels")

import pytest
import torch

import sonicmoe.integrations.transformers as sonicmoe_transformers

#: Of each marked class of experts: None if it trained, or why it was refused.
outcomes = {}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def name():
    return sonicmoe_transformers.register()


def pytest_terminal_summary(terminalreporter):
    if outcomes:
        refused = {key: why for key, why in outcomes.items() if why is not None}
        terminalreporter.write_line(
            f"marked classes of experts: {len(outcomes) - len(refused)} of {len(outcomes)} train"
        )
        for key, why in refused.items():
            terminalreporter.write_line(f"  refused: {key}: {why}")

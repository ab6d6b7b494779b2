"""Networks: parameter counts, initialisation, homogeneity; weights files, ours and foreign."""

from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from molaplace.errors import StorageError
from molaplace.saving.weights import load_weights
from molaplace_lab.checksums import network_checksum
from molaplace_lab.models import CifarResNet, WideResNet, build_network, lenet, resnet20, wrn16_4
from tests.closeness import assert_close
from tests.conftest import require_shared


@pytest.mark.parametrize(
    ("build", "count", "published"),
    [
        (lenet, 44_426, 44_426),
        (resnet20, 269_722, 0.27e6),
        (lambda: CifarResNet(56), 853_018, 0.85e6),
        (lambda: CifarResNet(110), 1_727_962, 1.7e6),
        (wrn16_4, 2_748_890, 2_748_890),
        (lambda: WideResNet(28, 10), 36_479_194, 36.5e6),
    ],
)
def test_parameter_counts(build, count, published):
    with torch.device("meta"):  # shapes without numbers
        network = build()
    assert sum(parameter.numel() for parameter in network.parameters()) == count == pytest.approx(published, rel=0.03)


def plain_wrn16_4(network, images):
    """WRN-16-4 in evaluation, written out layer by layer from its state."""
    state = network.state_dict()
    relu = torch.relu
    conv = nn.functional.conv2d

    def norm(name, values):
        parts = [state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        mean, variance, scale, shift = (part[:, None, None] for part in parts)
        return (values - mean) / (variance + 1e-5).sqrt() * scale + shift

    hidden = conv(images, state["conv1.weight"], padding=1)
    for group, stride in ((1, 1), (2, 2), (3, 2)):
        for block in (0, 1):
            name = f"group{group}.{block}"
            step = stride if block == 0 else 1
            active = relu(norm(f"{name}.bn1", hidden))
            shortcut = conv(active, state[f"{name}.shortcut.weight"], stride=step) if block == 0 else hidden
            inner = relu(norm(f"{name}.bn2", conv(active, state[f"{name}.conv1.weight"], stride=step, padding=1)))
            hidden = conv(inner, state[f"{name}.conv2.weight"], padding=1) + shortcut
    pooled = nn.functional.avg_pool2d(relu(norm("bn", hidden)), 8)[:, :, 0, 0]
    return pooled @ state["linear.weight"].T + state["linear.bias"]


def test_wide_resnet_computes_what_the_paper_describes():
    torch.manual_seed(0)
    network = wrn16_4()
    for name, buffer in network.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(0.5 + torch.rand_like(buffer))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert_close(network.eval()(images), plain_wrn16_4(network, images))


def test_wide_resnet_starts_and_drops_as_the_paper_says():
    torch.manual_seed(1)
    network = wrn16_4()
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d):
            expected = (2 / (module.kernel_size[0] ** 2 * module.out_channels)) ** 0.5
            tolerance = 4 / (2 * module.weight.numel()) ** 0.5  # four standard errors of a standard deviation
            assert module.bias is None
            assert float(module.weight.detach().std()) == pytest.approx(expected, rel=tolerance), name
    assert bool((network.linear.bias == 0).all())
    drops = [module.p for module in network.modules() if isinstance(module, nn.Dropout)]
    assert drops == [0.3] * 6


@pytest.mark.real_data
def test_shared_networks_load():
    files = [(resnet20, file) for file in sorted(require_shared("networks/resnet20").glob("*.safetensors"))]
    files += [
        (partial(build_network, "resnet-56"), file)
        for file in sorted(require_shared("networks/resnet56").glob("*.safetensors"))
    ]
    assert len(files) == 22
    for build, file in files:
        network = build()
        load_weights(network, file)
        expected = load_file(file)
        assert all(torch.equal(value, network.state_dict()[name]) for name, value in expected.items())
    with pytest.raises(StorageError, match=r"missing: layer1\.3.*depth"):
        load_weights(build_network("resnet-56"), require_shared("networks/resnet20/00.safetensors"))


@pytest.mark.real_data
def test_a_shared_network_is_as_accurate_as_reported():
    folder = require_shared("cifar10")
    with Image.open(folder / "test_batch.webp") as mosaic:  # tiles of 32 x 32, 100 to a row
        rows = np.array(mosaic.crop((0, 0, 3200, 320)))
    images = torch.from_numpy(rows.reshape(10, 32, 100, 32, 3)).permute(0, 2, 4, 1, 3).reshape(1000, 3, 32, 32)
    mean = torch.tensor([0.485, 0.456, 0.406])
    std = torch.tensor([0.229, 0.224, 0.225])
    inputs = (images / 255 - mean[:, None, None]) / std[:, None, None]
    labels = torch.from_numpy(np.fromfile(folder / "test_batch.labels", np.uint8)[:1000]).long()
    network = resnet20().float().eval()
    load_weights(network, require_shared("networks/resnet20") / "00.safetensors")
    with torch.no_grad():
        predicted = torch.cat([network(part).argmax(1) for part in inputs.float().split(250)])
    # 91.4 to 92.7 % on all 10,000; on 1,000 of them, two standard errors more either way.
    assert 0.914 - 0.017 < float((predicted == labels).double().mean()) < 0.927 + 0.017


def test_a_network_is_identified_by_its_architecture_and_its_weights():
    network = build_network("mlp", 5)
    same = build_network("mlp", 5)
    same.load_state_dict(network.state_dict())
    assert network_checksum(same, "mlp") == network_checksum(network, "mlp")
    assert network_checksum(network, "other") != network_checksum(network, "mlp")
    with torch.no_grad():
        next(same.parameters()).flatten()[0] += 1
    assert network_checksum(same, "mlp") != network_checksum(network, "mlp")

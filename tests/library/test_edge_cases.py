"""Cases at the edges of fitting and tuning: shared memory, chunks of a batch, labels that do not count."""

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.rules.scores import paired
from molaplace.structures.distance import ClassDistance
from molaplace.sums import Sums
from tests.closeness import assert_close


def small(seed=0, outputs=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs)).double().eval()


def data(count=120, seed=1, classes=3):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :classes].argmax(1)


@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
def test_outliers_may_have_labels_of_another_data_set():
    inputs, labels = data()
    posterior = mola.fit(small(), [(inputs, labels)], progress=False)
    rule = mola.rules.Outliers([(inputs * 5, torch.full((120,), 99))])
    posterior.tune([(inputs, labels)], rule=rule, progress=False)


def test_class_means_do_not_depend_on_the_weight_of_the_data():
    inputs, labels = data()
    sums = mola.fit(small(), [(inputs, labels)], progress=False).components[0].layer.sums
    whole, light = (ClassDistance.solve(one) for one in (sums, sums.scaled(1e-3, 1)))
    assert_close(light.means @ torch.linalg.pinv(light.root), whole.means @ torch.linalg.pinv(whole.root), "search")


def test_a_running_average_takes_a_batch_as_a_whole():
    inputs, labels = data(5000)
    structure = mola.structures.Kron(running_average=0.5)
    posterior = mola.fit(small(), [(inputs, labels)], structure=structure, progress=False)
    gram = posterior.components[0].layer.sums.tensors["gram"]
    assert float(gram[-1, -1]) == pytest.approx(2500)


def test_stacking_a_pooled_regression_is_no_worse_than_before():
    generator = torch.Generator().manual_seed(3)
    inputs, _ = data()
    targets = inputs[:, :1] + 0.3 * torch.randn(120, 1, generator=generator, dtype=torch.float64)
    networks = [small(seed, 1) for seed in range(3)]
    likelihood = mola.likelihoods.Gaussian(noise=0.4)
    posterior = mola.fit(networks, [(inputs, targets)], likelihood=likelihood, progress=False).with_pooling(0.0)

    def log_loss(one):
        return -float(one.predict(inputs).log_prob(targets).mean())

    assert log_loss(posterior.reweight([(inputs, targets)], progress=False)) <= log_loss(posterior) + 1e-9


def test_weights_and_features_are_copied():
    inputs, labels = data()
    posterior = mola.fit([small(0), small(1)], [(inputs, labels)], progress=False)
    weights = torch.tensor([0.3, 0.7], dtype=torch.float64)
    weighted = posterior.with_weights(weights)
    before = weighted(inputs)
    weights[:] = torch.tensor([1.0, 0.0])
    assert torch.equal(weighted(inputs), before)
    held = posterior.read([(inputs, labels)], "loader", labelled=True)
    prediction = posterior.predict_from_features(held.phi, held.outputs)
    for tensor in (*held.phi, *held.outputs):
        tensor.zero_()
    assert_close(prediction.ood_score, posterior.predict(inputs).ood_score, "float64")


@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
def test_distance_keeps_what_its_first_rule_chose():
    inputs, labels = data(300)
    posterior = mola.fit([small(seed) for seed in range(3)], [(inputs, labels)], progress=False)
    first = posterior.tune([(inputs, labels)], rule="calibrated", progress=False)
    second = posterior.tune(
        [(inputs, labels)], rule=mola.rules.Distance(price=0.02, rule=mola.rules.Calibrated()), progress=False
    )
    assert (second.pooling, second.temperature) == (first.pooling, first.temperature)


def test_a_resumed_fit_notices_other_labels_in_numpy(tmp_path):
    inputs, labels = data()

    def batches(changed, broken):
        for index in range(6):
            if broken and index == 4:
                raise KeyboardInterrupt
            some = labels[20 * index : 20 * index + 20]
            yield inputs[20 * index : 20 * index + 20], ((some + changed) % 3).numpy()

    options = {"checkpoint": tmp_path / "fit", "checkpoint_every": 1, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        mola.fit(small(), batches(0, broken=True), **options)
    with pytest.raises(mola.errors.StorageError, match="changed"):
        mola.fit(small(), batches(1, broken=False), **options)


def test_labels_of_one_input_count_once_in_a_standard_error():
    inputs, _ = data(60)
    network = nn.Linear(4, 1).double()
    labels = (inputs[:, :1] > 0).double()

    class Copied(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.head = nn.Linear(4, count).double()
            with torch.no_grad():
                self.head.weight.copy_(network.weight.expand(count, -1))
                self.head.bias.copy_(network.bias.expand(count))

        def forward(self, x):
            return self.head(x)

    errors = []
    for count in (1, 30):
        copies = labels.expand(-1, count)
        posterior = mola.fit(Copied(count), [(inputs, copies)], likelihood="bernoulli", progress=False)
        held = posterior.read([(inputs, copies)], "loader", labelled=True)
        loss = posterior.predictive(next(held.chunks())).scores(held.labels)["nll"]
        errors.append(paired(loss, torch.zeros_like(loss), held)[1])
    assert errors[0] == pytest.approx(errors[1], rel=1e-9)


def test_sums_do_not_share_memory():
    one = Sums({"gram": torch.ones(2, 2, dtype=torch.float64)}, 1)
    total = Sums({}) + one
    total += one
    assert float(one.tensors["gram"][0, 0]) == 1

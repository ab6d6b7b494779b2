"""What is served can be watched: an exported file, and the outputs that a server computed with it."""

import pytest
import torch

import molaplace as mola
from molaplace.errors import DataError, OptionError
from tests.closeness import assert_close
from tests.library import problems


@pytest.mark.export
def test_an_exported_file_is_watched_like_its_posterior(tmp_path):
    networks = [problems.trained(seed) for seed in range(2)]
    val = problems.blob_loader(1, count=400)
    posterior = mola.fit(networks, problems.blob_loader(), val, progress=False)
    path = tmp_path / "model.pt2"
    mola.export.torch_export(posterior, path, val[0][0][:2])
    exported = mola.export.load(path, trust=True)
    inputs, labels = problems.blobs(2, count=200)
    expected = posterior.predict(inputs)
    outputs = exported(inputs)
    served = exported.prediction_of({name: values.numpy() for name, values in outputs.items()})
    assert served.fingerprint == expected.fingerprint == exported.fingerprint
    for name in ("probs", "label", "confidence", "entropy", "epistemic", "aleatoric", "distance"):
        assert_close(getattr(served, name), getattr(expected, name), "difference", name=name)
    watch = mola.watch(exported, val)
    assert watch.baseline.accuracy == mola.watch(posterior, val).baseline.accuracy
    watch.update(exported.predict_batch(inputs[:100]), labels=labels[:100]).update(served[100:], labels=labels[100:])
    watch.update(expected)  # the same fingerprint
    assert watch.labelled.value == pytest.approx(float((expected.label == labels).double().mean()))
    assert not watch.alarm
    shifted = exported(torch.zeros_like(inputs))  # a stuck sensor
    assert watch.update(exported.prediction_of(shifted)).alarm
    with pytest.raises(OptionError, match=r"exported\.prediction_of"):
        watch.update(shifted)
    with pytest.raises(OptionError, match="another predictor"):
        watch.update(posterior.with_temperature(2.0).predict(inputs))
    with pytest.raises(DataError, match="ood_score"):
        exported.prediction_of({"probs": outputs["probs"]})
    alarm = mola.alarm_threshold(torch.cat([exported(x)["ood_score"] for x, _ in val]), 0.05)
    assert alarm(outputs["ood_score"]).double().mean() < 0.2

"""The explorer without its page: pictures, changes, opinions and figures, by the laws that they keep."""

from __future__ import annotations

import asyncio
import base64
import io
import math
import re
import threading
import time
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import mola
from mola.app.explore.answers import (
    SLIDERS,
    Answers,
    classes_card,
    confidence_card,
    heading,
    members_card,
    message,
    percent,
    score_card,
    shown_classes,
    split_card,
    thumbnails,
    turned_card,
    verdict,
)
from mola.app.explore.changes import NEUTRAL, RANGES, Changes, apply
from mola.app.explore.opinions import METHODS, STEPS, Explorer, Member, Opinions, affordable
from mola.app.explore.pictures import LARGEST_FILE, LARGEST_PIXELS, Sight, decode, from_data_url, to_data_url
from mola.app.explore.server import LARGEST_REQUEST, Guarded
from mola.app.explore.subject import Example, Reference, Subject, ood_examples
from mola.app.jobs.fit import LEVELS, quantiles
from mola.app.jobs.preparation import Intake
from mola.errors import DataError, OptionError, StorageError
from mola.lab.data.images import NORMALISATIONS
from tests.closeness import assert_close

SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar": (3, 32, 32), "wide": (3, 12, 20)}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def shape(request):
    return request.param


def noise(shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


class Pause(nn.Module):
    """Lets other threads go on in the middle of a pass, as larger networks do."""

    def forward(self, features):
        time.sleep(0.002)
        return features


def make_subject(shape, classes=("ape", "bee", "cow", "doe"), members=3, between=nn.Identity, **changes):
    """Networks that were never trained, fitted to noise: their numbers are as good as any to be compared."""
    torch.manual_seed(1)
    size = math.prod(shape)
    networks = [
        nn.Sequential(nn.Flatten(), nn.Linear(size, 16), nn.ReLU(), between(), nn.Linear(16, len(classes))).float()
        for _ in range(members)
    ]
    intake = Intake(mode="L" if shape[0] == 1 else "RGB", mean=(0.3,) * shape[0], std=(0.6,) * shape[0], shape=shape)
    sight = Sight.of(shape, intake)
    train = sight.inputs(torch.stack([noise(shape, seed) for seed in range(40)]) / 255)
    labels = torch.arange(40) % len(classes)
    posterior = mola.fit(networks, [(train, labels)], weights=[0.5, 0.3, 0.2][:members] if members == 3 else "uniform")
    reference = Reference.of(posterior.predict(train).ood_score, "noise")
    subject = Subject("nets", "here", posterior, tuple(classes), sight, reference, (Example("one", noise(shape)),))
    return replace(subject, **changes)


@pytest.fixture
def subject(shape):
    return make_subject(shape)


# --- changes ------------------------------------------------------------------------------------------------------------


def test_nothing_moved_is_the_identity_to_the_bit(shape):
    values = noise((5, *shape)).float() / 255
    assert apply(values, NEUTRAL) is values
    assert apply(values, Changes(seed=7)) is values


@pytest.mark.parametrize("name", [*RANGES, "invert"])
def test_each_change_alone_leaves_shape_and_range_and_moves_something(shape, name):
    values = noise((2, *shape)).float() / 255
    ends = (True,) if name == "invert" else RANGES[name]
    for end in ends:
        if end == getattr(NEUTRAL, name):
            continue
        changed = apply(values, Changes(**{name: end}))
        assert changed.shape == values.shape
        assert changed.dtype == values.dtype
        assert 0 <= float(changed.min()) <= float(changed.max()) <= 1
        if (name, end) not in (("rotation", -180.0), ("rotation", 180.0)):
            assert not torch.equal(changed, values)


def test_moving_one_slider_to_its_neutral_value_again_is_as_if_it_had_not_been_moved(shape):
    values = noise((1, *shape)).float() / 255
    turned = Changes(rotation=30.0, blur=2.0)
    assert torch.equal(apply(values, replace(turned, blur=0.0)), apply(values, Changes(rotation=30.0)))


def test_inverting_twice_and_a_full_turn_give_the_picture_back(shape):
    values = noise((1, *shape)).double() / 255
    twice = apply(apply(values, Changes(invert=True)), Changes(invert=True))
    assert torch.allclose(twice, values, atol=1e-15)
    if shape[1] == shape[2]:
        quarter = values
        for _ in range(4):
            quarter = apply(quarter, Changes(rotation=90.0))
        assert torch.allclose(quarter, values, atol=1e-9)
        assert torch.allclose(apply(values, Changes(rotation=90.0)), torch.rot90(values, 1, (-2, -1)), atol=1e-9)


def test_noise_is_given_by_its_seed_and_has_its_strength():
    grey = torch.full((1, 1, 200, 200), 0.5)
    one, same, other = (apply(grey, Changes(noise=0.05, seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert float((one - grey).std()) == pytest.approx(0.05, rel=0.02)
    assert float((one - grey).mean()) == pytest.approx(0, abs=0.001)


def test_blur_is_a_gaussian_that_keeps_constants_and_mass():
    constant = torch.full((1, 3, 16, 16), 0.25)
    assert torch.allclose(apply(constant, Changes(blur=5.0)), constant, atol=1e-12)
    point = torch.zeros(1, 1, 101, 101)
    point[..., 50, 50] = 1
    blurred = apply(point, Changes(blur=4.0))[0, 0]
    places = torch.arange(101) - 50.0
    assert float(blurred.sum()) == pytest.approx(1, abs=1e-9)
    assert float((blurred.sum(0) * places.square()).sum()) == pytest.approx(4.04**2, rel=0.03)  # 4 % of 101 pixels


def test_size_scales_areas_about_the_middle():
    disc = ((torch.arange(64)[:, None] - 31.5) ** 2 + (torch.arange(64) - 31.5) ** 2 < 12**2).double()[None, None]
    for scale in (0.25, 0.4, 0.5, 0.9, 1.5, 2.5):
        scaled = apply(disc, Changes(scale=scale))
        assert float(scaled.sum() / disc.sum()) == pytest.approx(scale**2, rel=0.03), scale
        assert torch.allclose(scaled, scaled.flip(-1), atol=1e-9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rotation": 181.0},
        {"scale": 0.0},
        {"noise": -0.1},
        {"blur": math.nan},
        {"contrast": "1"},
        {"seed": -1},
        {"seed": 0.5},
    ],
    ids=str,
)
def test_values_that_no_slider_has_are_refused(wrong):
    with pytest.raises(OptionError, match=f"{next(iter(wrong))} must be"):
        Changes(**wrong)


# --- pictures -----------------------------------------------------------------------------------------------------------


def saved(image, form="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format=form, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "PPM", "WEBP", "GIF"])
def test_bytes_survive_every_lossless_format(form):
    pixels = noise((1, 9, 7))[0].numpy()
    data = saved(Image.fromarray(pixels), form, **({"lossless": True} if form == "WEBP" else {}))
    image = decode(data).image
    assert np.array_equal(np.asarray(image.convert("L")), pixels)


def test_a_photograph_is_turned_upright():
    image = Image.new("RGB", (4, 2), "red")
    exif = image.getexif()
    exif[0x0112] = 6
    assert decode(saved(image, "JPEG", exif=exif)).image.size == (2, 4)


def test_odd_pictures_are_taken_with_a_word_on_what_was_done():
    frames = [Image.fromarray(noise((1, 6, 6), seed)[0].numpy()) for seed in range(3)]
    animated = decode(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert animated.notes == ("the first of its frames",)
    assert np.array_equal(np.asarray(animated.image.convert("L")), np.asarray(frames[0]))

    deep = decode(saved(Image.fromarray(np.array([[0, 256, 65535]], dtype=np.uint16))))
    assert deep.notes == ("16 bits a pixel brought to 8",)
    assert np.asarray(deep.image).tolist() == [[0, 1, 255]]

    clear = decode(saved(Image.fromarray(np.array([[[9, 9, 9, 255], [9, 9, 9, 0]]], dtype=np.uint8))))
    assert clear.notes == ("transparent parts filled with white",)
    assert np.asarray(clear.image).tolist() == [[[9, 9, 9], [255, 255, 255]]]

    opaque = decode(saved(Image.new("RGBA", (2, 2), (1, 2, 3, 255))))
    assert opaque.notes == ()

    for mode in ("1", "P", "CMYK", "LA"):
        form = "TIFF" if mode == "CMYK" else "PNG"
        assert decode(saved(Image.new("RGB", (3, 3), "white").convert(mode), form)).image.mode in ("L", "RGB")


def bomb(width, height):
    """A PNG of a few bytes that claims to hold an enormous picture."""

    def chunk(kind, body):
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 0])
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(b"\0" * 1000)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


REFUSED = {
    "empty": (b"", "is empty"),
    "text": (b"once upon a time", "is no image that can be read here: expected PNG, JPEG"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no image"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no image"),
    "cut off": (saved(Image.fromarray(noise((1, 60, 60))[0].numpy()))[:-900], "cannot be decoded"),
    "heading alone": (b"\x89PNG\r\n\x1a\n", "is no image|cannot be decoded"),
    "bomb": (bomb(30_000, 30_000), "more than 40 million: save it smaller"),
    "large bomb": (bomb(9_000, 9_000), "9,000 x 9,000 pixels, more than 40 million"),
    "oversize": (b"\x89PNG" + bytes(LARGEST_FILE), "is larger than 10 MB: save it smaller"),
    "floating point": (saved(Image.fromarray(np.ones((2, 2), dtype=np.float32)), "TIFF"), "whose range is unknown"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_in_words(name):
    data, words = REFUSED[name]
    with pytest.raises(DataError, match=words) as refusal:
        decode(data, "holiday.png")
    assert str(refusal.value).startswith("holiday.png ")
    assert "\n" not in str(refusal.value)


def chained(count):
    """A TIFF of one small picture, followed by so many frames that hold next to nothing."""
    data = bytearray(saved(Image.new("L", (8, 8)), "TIFF"))
    data += bytes(len(data) % 2)
    start = int.from_bytes(data[4:8], "little")
    after = start + 2 + 12 * int.from_bytes(data[start : start + 2], "little")
    size = b"".join(tag.to_bytes(2, "little") + bytes([4, 0, 1, 0, 0, 0, 8, 0, 0, 0]) for tag in (256, 257, 273))
    places = [len(data) + 42 * place for place in range(count)]
    data[after : after + 4] = places[0].to_bytes(4, "little")
    for following in (*places[1:], 0):
        data += bytes([3, 0]) + size + following.to_bytes(4, "little")
    return bytes(data)


def test_frames_are_not_counted():
    """Pillow reads each, and looks for it among all before it: 15 s for these 1.7 MB, minutes for a file as large as may be."""
    began = time.process_time()
    assert decode(chained(40_000)).notes == ("the first of its frames",)
    assert time.process_time() - began < 1


def test_a_picture_of_the_largest_size_is_not_refused():
    side = math.isqrt(LARGEST_PIXELS)
    assert decode(saved(Image.new("1", (side, side)))).image.size == (side, side)


def test_names_in_messages_are_short_and_printable():
    with pytest.raises(DataError) as refusal:
        decode(b"", "a" * 500 + "\x1b[31m.png")
    assert len(str(refusal.value)) < 200
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    "text", ["", "hello", "data:image/png,abc", "data:image/png;base64,@@@", "data:image/png;base64,a"]
)
def test_an_address_that_holds_no_picture_is_refused(text):
    with pytest.raises(DataError, match="did not arrive whole"):
        from_data_url(text)


def test_an_address_is_not_decoded_when_it_is_too_long():
    with pytest.raises(DataError, match="larger than 10 MB"):
        from_data_url("data:image/png;base64," + "A" * (LARGEST_FILE * 4 // 3 + 300))


# --- sight --------------------------------------------------------------------------------------------------------------


def test_a_picture_of_the_right_size_is_taken_to_the_bit_and_comes_back(shape):
    sight, pixels = make_subject(shape).sight, noise(shape)
    image = decode(from_data_url(to_data_url(pixels))).image
    fitted, done = sight.fit(image)
    assert torch.equal(fitted, pixels)
    assert done == ""
    assert torch.equal(sight.read(to_data_url(pixels)), pixels)


@pytest.mark.parametrize("name", NORMALISATIONS)
def test_inputs_are_those_that_the_networks_were_trained_on_to_the_bit(name):
    own = NORMALISATIONS[name]
    sight = Sight.of((3, 9, 9), Intake(mean=own.mean, std=own.std))
    pixels = noise((4, 3, 9, 9))
    inputs = sight.inputs(pixels.to(torch.float32) / 255)
    assert torch.equal(inputs, own(pixels))
    assert torch.allclose(sight.values(inputs), pixels / 255, atol=1e-6)


def test_a_picture_of_another_size_is_cut_to_the_proportions_about_its_middle():
    sight = Sight.of((1, 10, 20), Intake())
    picture = np.zeros((300, 200), dtype=np.uint8)
    picture[100:200] = 255  # the middle 200 x 100
    pixels, done = sight.fit(Image.fromarray(picture))
    assert pixels.shape == (1, 10, 20)
    assert float(pixels.float().mean()) > 250
    assert done == "200 x 300 pixels brought to 20 x 10"


def test_the_training_datas_own_preparation_comes_first():
    picture = Image.fromarray(noise((3, 40, 60)).permute(1, 2, 0).numpy())
    intake = Intake(resize=16, crop=12, mode="RGB")
    pixels, _ = Sight.of((3, 12, 12), intake).fit(picture)
    assert torch.equal(pixels, intake.prepare(picture))


def test_colours_become_grey_with_a_word():
    assert Sight.of((1, 4, 4), Intake()).fit(Image.new("RGB", (4, 4), "red"))[1] == "colours turned to grey"
    assert Sight.of((1, 4, 4), Intake()).fit(Image.new("RGB", (4, 4), "white"))[1] == ""


@pytest.mark.parametrize("wrong", [(8,), (2, 8, 8), (1, 1, 8), (1, 8, 2000), (3, 8, 8, 8), ()])
def test_inputs_that_are_no_pictures_are_refused(wrong):
    with pytest.raises(OptionError, match=r"for networks that see pictures.*`mola predict`"):
        Sight.of(wrong, Intake())


def test_a_page_that_sends_a_picture_of_another_size_is_refused():
    with pytest.raises(DataError, match="expected a picture of 8 x 8 pixels, got 9 x 8"):
        Sight.of((1, 8, 8), Intake()).read(to_data_url(noise((1, 8, 9))))


# --- opinions -----------------------------------------------------------------------------------------------------------


def test_all_three_methods_say_what_their_public_forms_say(subject):
    explorer, pixels = Explorer(subject), noise(subject.sight.shape, 5)
    changes = Changes(rotation=20.0, noise=0.1, seed=2)
    opinions = explorer.look(pixels, changes)
    inputs = subject.sight.inputs(apply(pixels[None].float() / 255, changes))
    networks = list(subject.posterior.networks)
    expected = {
        "MAP": mola.ensemble([networks[0]]),
        "DE": mola.ensemble(networks, subject.posterior.weights),
        "MoLA": subject.posterior,
    }
    for method, predictor in expected.items():
        assert_close(opinions.probs[method], predictor(inputs)[0])
    prediction = subject.posterior.predict(inputs)
    assert_close(opinions.epistemic, prediction.epistemic[0], "difference", scale=1.0)
    assert_close(opinions.aleatoric, prediction.aleatoric[0], scale=1.0)
    assert_close(opinions.score, prediction.ood_score[0], "difference", scale=1.0)
    assert_close(opinions.distance, prediction.distance[0])
    assert_close(opinions.confidence("MoLA"), prediction.confidence[0])
    assert opinions.label("MoLA") == int(prediction.label[0])


@pytest.mark.parametrize("exponent", [0.0, 3.0])
def test_the_components_make_up_the_mixture(subject, exponent):
    plain = subject.posterior
    subject = replace(subject, posterior=plain.with_distance_exponent(exponent))
    assert Explorer(subject).look(noise(subject.sight.shape, 6), NEUTRAL).uncooled == (
        None
        if exponent == 0
        else pytest.approx(
            Explorer(replace(subject, posterior=plain)).look(noise(subject.sight.shape, 6), NEUTRAL).confidence("MoLA"),
            abs=1e-6,
        )
    )
    opinions = Explorer(subject).look(noise(subject.sight.shape, 6), NEUTRAL)
    weights = [member.weight for member in opinions.members]
    assert weights == pytest.approx([0.5, 0.3, 0.2])
    mixed = np.einsum("k,kc->c", weights, np.array([member.laplace for member in opinions.members]))
    assert_close(mixed, opinions.probs["MoLA"])
    plain = np.einsum("k,kc->c", weights, np.array([member.network for member in opinions.members]))
    assert_close(plain, opinions.probs["DE"])
    assert_close(opinions.members[0].network, opinions.probs["MAP"])
    for method in METHODS:
        assert_close(sum(opinions.probs[method]), 1)


def test_the_curve_passes_through_what_is_seen_now(subject):
    explorer, pixels = Explorer(subject), noise(subject.sight.shape, 7)
    explorer.step = 45
    for rotation in (0.0, 17.0, -90.0):
        changes = Changes(rotation=rotation, scale=1.3)
        turned, opinions = explorer.turn(pixels, changes), explorer.look(pixels, changes)
        assert {*range(-180, 181, 45), rotation} == set(turned.angles)
        here = turned.angles.index(rotation)
        for method in METHODS:
            assert_close(turned.confidence[method][here], opinions.confidence(method))
        assert turned.labels[here] == opinions.label("MoLA")
        assert turned.confidence["MAP"][0] == pytest.approx(turned.confidence["MAP"][-1], abs=1e-5)  # half turns meet


def test_a_curve_is_as_fine_as_patience_allows():
    assert affordable(0.001, STEPS) == 10
    assert affordable(0.05, STEPS) == 15
    assert affordable(0.15, STEPS) == 45
    assert affordable(10.0, STEPS) is None
    subject = make_subject((1, 8, 8))
    explorer = Explorer(subject)
    explorer.step = None
    assert explorer.turn(noise((1, 8, 8)), NEUTRAL) is None
    assert "too slow for a curve" in turned_card(None, 0.0)


def test_people_who_ask_at_once_get_their_own_answers():
    subject = make_subject((1, 8, 8), between=Pause)
    explorer = Explorer(subject)
    pictures = [noise((1, 8, 8), seed) for seed in range(6)]
    alone = [explorer.look(pixels, NEUTRAL) for pixels in pictures]
    wrong: list[int] = []
    start = threading.Barrier(len(pictures))

    def ask(index):
        start.wait()
        for _ in range(5):
            try:
                right = explorer.look(pictures[index], NEUTRAL) == alone[index]
            except Exception:
                right = False
            if not right:
                wrong.append(index)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(pictures))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_networks_are_left_as_they_were():
    subject = make_subject((1, 8, 8))
    before = [{name: value.clone() for name, value in one.state_dict().items()} for one in subject.posterior.networks]
    subject.posterior.networks[0].train()
    explorer = Explorer(subject)
    explorer.look(noise((1, 8, 8)), NEUTRAL)
    explorer.turn(noise((1, 8, 8)), NEUTRAL)
    assert subject.posterior.networks[0].training
    for network, old in zip(subject.posterior.networks, before, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in network.state_dict().items())
        assert not any(module._forward_hooks for module in network.modules())


# --- the reference ------------------------------------------------------------------------------------------------------


def test_shares_are_those_of_the_data():
    scores = torch.randn(5000, generator=torch.Generator().manual_seed(0)) ** 3
    reference = Reference.of(scores, "val")
    for probe in (*torch.quantile(scores, torch.tensor([0.02, 0.3, 0.7, 0.953, 0.9921])).tolist(), 0.0):
        assert reference.share_below(probe) == pytest.approx(float((scores < probe).double().mean()), abs=0.005)
    assert reference.share_below(float(scores.min()) - 1) == 0
    assert reference.share_below(float(scores.max()) + 1) == 1
    edges = np.linspace(float(scores.min()), float(scores.max()), 9).tolist()
    shares = reference.histogram(edges)
    assert sum(shares) == pytest.approx(1)
    counted = np.histogram(scores.numpy(), edges)[0] / 5000
    assert shares == pytest.approx(counted.tolist(), abs=0.02)


def test_a_reference_comes_back_from_what_fitting_writes():
    scores = torch.randn(300)
    reference = Reference.of(scores, "val")
    threshold = mola.alarm_threshold(scores, 0.05)
    document = {"count": 300, "outlier_quantiles": quantiles(scores.numpy()), "outlier_threshold": threshold}
    assert Reference.from_plain(document, "val") == reference
    assert (LEVELS[0], LEVELS[-1]) == (0.0, 1.0)
    assert all(a < b for a, b in pairwise(LEVELS))
    assert Reference.from_plain({"outlier_threshold": 1.0}, "val") is None  # as older folders are
    assert Reference.from_plain(None, "val") is None


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [[0.0, 1.0]],
        [[0.0, 2.0], [1.0, 1.0]],
        [[0.0, 1.0], [0.5, 2.0]],
        [[0.0, 1.0], [1.0, math.inf]],
        3,
        [[0.0], [1.0]],
        ["ab"],
    ],
    ids=str,
)
def test_garbled_quantiles_are_refused(pairs):
    with pytest.raises(StorageError, match="quantiles of the outlier score are invalid"):
        Reference.from_plain({"count": 5, "outlier_quantiles": pairs}, "val")


def test_scores_of_nothing_are_refused():
    with pytest.raises(DataError, match="val holds no input"):
        Reference.of(torch.zeros(0), "val")


def test_words_compare_without_claiming_more_than_is_known():
    reference = Reference((0.0, 0.99, 1.0), (0.0, 1.0, 2.0), 1234, "val")
    assert reference.words(1.2) == "more outlying than 99.2 % of the validation data"
    assert reference.words(0.5) == "more outlying than 50 % of the validation data"
    assert reference.words(3.0) == "more outlying than all 1,234 validation images"
    assert reference.words(-1.0) == "less outlying than all 1,234 validation images"


# --- words and figures --------------------------------------------------------------------------------------------------


def opinions_of(probs, aleatoric=0.1, epistemic=0.2, score=0.0, distance=None, uncooled=None):
    rows = {method: tuple(row) for method, row in zip(METHODS, probs, strict=True)}
    return Opinions(rows, aleatoric, epistemic, score, (Member(1.0, rows["MAP"], rows["MoLA"]),), distance, uncooled)


@pytest.mark.parametrize(
    ("distance", "uncooled", "words"),
    [
        (
            2.31,
            0.87,
            "1.0 is usual, this picture is 2.3 times as far. Without caution by distance MoLA would be 87.0 % sure.",
        ),
        (1.04, None, "1.0 is usual, this picture is no farther (1.0)."),
        (250.4, None, "1.0 is usual, this picture is 250 times as far."),
    ],
)
def test_the_distance_stands_beside_the_outlier_score(distance, uncooled, words):
    opinions = opinions_of([(0.7, 0.1, 0.1, 0.1)] * 3, distance=distance, uncooled=uncooled)
    for reference in (None, Reference((0.0, 1.0), (0.0, 1.0), 20, "val")):
        assert words in "".join(parsed(score_card(opinions, reference)).text)
    assert "data-distance" not in score_card(opinions_of([(0.7, 0.1, 0.1, 0.1)] * 3), None)


def test_percentages_never_claim_certainty():
    assert [percent(value) for value in (1.0, 0.99999, 0.9994, 0.5, 0.0001, 0.0)] == [
        "100.0 %",
        "> 99.9 %",
        "99.9 %",
        "50.0 %",
        "< 0.1 %",
        "0.0 %",
    ]


def test_the_verdict_says_who_says_what_and_why():
    subject = make_subject((1, 8, 8), reference=Reference((0.0, 0.95, 0.99, 1.0), (0.0, 1.0, 2.0, 3.0), 100, "val"))
    sure, torn = (0.98, 0.01, 0.01, 0.0), (0.4, 0.35, 0.2, 0.05)
    same = verdict(opinions_of([sure, sure, sure], score=0.5), subject)
    assert same[0] == "All say ape: the single network with 98.0 %, the ensemble with 98.0 %, MoLA with 98.0 %."
    assert same[1:] == ["As pictures go, it is not unusual: more outlying than 48 % of the validation data."]
    strange = verdict(opinions_of([sure, torn, torn], 0.1, 0.9, score=2.5), subject)
    assert strange[1].startswith(
        "This is unlike what the networks know, however sure the single network is: it is more"
    )
    assert strange[2].startswith("Most of MoLA's doubt is epistemic (90 %), the other 10 % aleatoric: weights that fit")
    assert "more than one class" not in " ".join(strange), "the single network is sure"
    other = verdict(opinions_of([sure, sure, torn[::-1]], 0.9, 0.1, score=1.5), subject)
    assert other[0].startswith("They disagree: the single network says ape with 98.0 %")
    assert other[1].startswith("It is unusual: more outlying than 97.0 %")
    assert other[2] == "Little of MoLA's doubt is epistemic (10 %), the other 90 % aleatoric."
    assert other[3].startswith(
        "Each network by itself is sure (98.0 % on average). The probit link also lowers confidence"
    )
    centred = replace(subject, posterior=subject.posterior.with_link("probit-centered"))
    assert len(verdict(opinions_of([sure, sure, torn[::-1]], 0.9, 0.1, score=1.5), centred)) == 3
    assert len(verdict(opinions_of([sure, sure, sure]), replace(subject, reference=None))) == 1


def test_the_verdict_says_what_caution_by_distance_takes():
    subject = make_subject((1, 8, 8), reference=None)
    rows = [(0.98, 0.01, 0.01, 0.0)] * 2 + [(0.6, 0.2, 0.1, 0.1)]
    far, long, near = (
        " ".join(verdict(opinions_of(rows, distance=distance, uncooled=uncooled), subject))
        for distance, uncooled in ((2.31, 0.95), (1.0, 0.95), (2.31, 0.601))
    )
    lowers = "Caution by distance lowers MoLA's confidence from 95.0 % to 60.0 %: "
    assert lowers + "the picture is 2.3 times as far from the training classes as usual." in far
    assert lowers + "its features are stronger than usual." in long
    assert "Caution" not in near


@pytest.mark.parametrize(
    ("epistemic", "alone", "much", "ambiguous"),
    [
        (0.30, (0.997, 0.998, 0.940), "Part", False),
        (0.14, (0.997, 0.998, 0.940), "Little", False),
        (0.14, (0.55, 0.60, 0.50), "Little", True),
        (0.30, (0.55, 0.60, 0.50), "Part", True),
        (0.70, (0.55, 0.60, 0.50), "Most", True),
    ],
)
def test_the_reason_for_doubt_is_held_against_the_networks_themselves(epistemic, alone, much, ambiguous):
    def row(top):
        return (top, 1 - top, 0.0, 0.0)

    mean = sum(alone) / len(alone)
    opinions = Opinions(
        dict(zip(METHODS, (row(alone[0]), row(mean), row(0.849 if mean > 0.9 else 0.5)), strict=True)),
        1 - epistemic,
        epistemic,
        0.0,
        tuple(Member(1 / 3, row(one), row(0.8)) for one in alone),
    )
    _, why, *more = verdict(opinions, make_subject((1, 8, 8), reference=None))
    assert why.startswith(
        f"{much} of MoLA's doubt is epistemic ({100 * epistemic:.0f} %), the other {100 - 100 * epistemic:.0f} %"
    )
    assert ("looks like more than one class" in why) == ambiguous
    assert ("which is neither" in " ".join(more)) == (not ambiguous)


def test_the_line_of_the_alarm_is_the_threshold_of_mola_predict():
    few = torch.arange(20.0)  # where the plain quantile, 18.05, is another number
    assert Reference.of(few, "val").alarm == mola.alarm_threshold(few, 0.05) == 19.0
    unknown = Reference((0.0, 1.0), (0.0, 1.0), 20, "val")
    assert "data-alarm" not in score_card(opinions_of([(0.7, 0.1, 0.1, 0.1)] * 3, score=0.5), unknown)
    scores = torch.arange(1001) / 1000
    reference = Reference.of(scores, "val")
    figure = score_card(opinions_of([(0.7, 0.1, 0.1, 0.1)] * 3, score=0.5), reference)
    assert float(re.search(r'data-alarm="([\d.]+)"', figure)[1]) == pytest.approx(mola.alarm_threshold(scores, 0.05))
    (place,) = re.findall(r'class="alarm"[^>]* x1="([\d.]+)"', figure)
    (now,) = re.findall(r'circle class="marker" cx="([\d.]+)"', figure)
    axis = [float(one) for one in re.search(r'class="axis" x1="([\d.]+)" x2="([\d.]+)"', figure).groups()]
    per_unit = (axis[1] - axis[0]) / 1.08  # the axis has a margin of 4 % on both sides
    assert float(place) - float(now) == pytest.approx((reference.alarm - 0.5) * per_unit, abs=0.11)


class Balanced(HTMLParser):
    """Notices tags that are not closed, and collects text."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("img", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(html):
    parser = Balanced()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser


def test_every_figure_is_sound_html_and_shows_its_numbers(subject):
    explorer = Explorer(subject)
    pixels, changes = noise(subject.sight.shape, 8), Changes(rotation=10.0)
    opinions = explorer.look(pixels, changes)
    confidence = parsed(confidence_card(opinions, subject))
    for method in METHODS:
        assert percent(opinions.confidence(method)) in confidence.text
    split = parsed(split_card(opinions))
    assert f"{opinions.aleatoric:.3f}" in split.text
    assert f"{opinions.epistemic:.3f}" in split.text
    assert sum(tag == "tr" for tag, _ in parsed(members_card(opinions, subject)).tags) == 1 + len(opinions.members)
    assert subject.reference.words(opinions.score).capitalize() in parsed(score_card(opinions, subject.reference)).text
    assert "no validation scores" in score_card(opinions, None)
    curve = parsed(turned_card(explorer.turn(pixels, changes), changes.rotation))
    assert sum(tag == "polyline" for tag, _ in curve.tags) == len(METHODS)
    assert sum(tag == "circle" for tag, _ in curve.tags) == len(METHODS)


def test_bars_are_as_long_as_what_they_stand_for():
    subject = make_subject((1, 8, 8))
    opinions = opinions_of([(0.7, 0.1, 0.1, 0.1), (0.4, 0.3, 0.2, 0.1), (0.25, 0.25, 0.25, 0.25)], 0.5, 0.25)
    widths = [float(one) for one in re.findall(r"width:([\d.]+)%", confidence_card(opinions, subject))]
    assert widths == [70.0, 40.0, 25.0]
    widths = [float(one) for one in re.findall(r"width:([\d.]+)%", split_card(opinions))]
    assert widths == pytest.approx([100 * 0.5 / math.log(4), 100 * 0.25 / math.log(4)], abs=0.01)


def test_of_many_classes_the_most_probable_are_shown():
    count = 1000
    probs = torch.softmax(torch.randn(3, count, generator=torch.Generator().manual_seed(0)) * 3, -1)
    opinions = opinions_of(probs.tolist())
    shown = shown_classes(opinions)
    assert len(shown) == 8
    assert {opinions.label(method) for method in METHODS} <= set(shown)
    subject = make_subject((1, 8, 8), classes=tuple(f"class {index}" for index in range(count)), members=1)
    assert "The 8 most probable of 1000 classes" in classes_card(opinions, subject)


def test_a_strangers_names_cannot_become_part_of_the_page():
    hostile = '<script>alert(1)</script>"><img src=x onerror=alert(2)>'
    subject = make_subject((1, 8, 8), classes=(hostile, "b'\"&<", "c", "d"), title=hostile, source=hostile)
    subject = replace(subject, notes=(hostile,), examples=(Example(hostile, noise((1, 8, 8))),))
    answers = Answers(Explorer(subject))
    picture = to_data_url(noise((1, 8, 8)))
    neutral = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0, False, 0)
    parts = [*answers.look(picture, *neutral), answers.turn(picture, *neutral), heading(subject), thumbnails(subject)]
    for html in (*parts, message(hostile), message(hostile, refused=True)):
        tags = parsed(html).tags
        assert not {"script", "iframe"} & {tag for tag, _ in tags}
        assert all(not name.startswith("on") for _, attributes in tags for name in attributes)
        assert all(attributes["src"].startswith("data:image/png") for tag, attributes in tags if tag == "img")


def test_colours_of_the_methods_are_those_of_the_reports():
    from importlib import resources

    from mola.compare.report.style import COLOURS

    css = resources.files("mola.app.explore").joinpath("assets", "style.css").read_text()
    light = css[: css.index(".dark")]
    for method in METHODS:
        assert f"--{method.lower()}: {COLOURS[method]};" in light


# --- answers ------------------------------------------------------------------------------------------------------------


def test_answers_take_drawings_files_and_sliders(subject):
    answers = Answers(Explorer(subject))
    channels, height, width = subject.sight.shape
    drawing = Image.new("RGB", (280, 280))
    drawing.paste("white", (120, 40, 160, 240))
    picture = answers.drawn("data:image/png;base64," + base64.b64encode(saved(drawing)).decode())
    assert subject.sight.read(picture).shape == subject.sight.shape
    data = saved(Image.fromarray(noise((3, 50, 70)).permute(1, 2, 0).numpy()), "JPEG")
    taken, words = answers.dropped("cat.jpg", len(data), "data:image/jpeg;base64," + base64.b64encode(data).decode())
    assert words.startswith(f"cat.jpg: 70 x 50 pixels brought to {width} x {height}")
    assert ("colours turned to grey" in words) == (channels == 1)
    assert len(SLIDERS) == len(RANGES)
    shown = answers.look(taken, 30.0, 1.2, 1.0, 0.1, 0.1, 1.5, True, 3)
    changes = Changes(30.0, 1.2, 1.0, 0.1, 0.1, 1.5, invert=True, seed=3)
    opinions = answers.explorer.look(subject.sight.read(taken), changes)
    assert all(percent(opinions.confidence(method)) in parsed(shown[1]).text for method in METHODS)
    assert answers.look("", 0.0)[0].count("Draw something") == 1
    assert answers.turn("", 0.0) == ""


def test_answers_refuse_what_is_too_large_or_does_not_come():
    answers = Answers(Explorer(make_subject((1, 8, 8))))
    with pytest.raises(DataError, match=r"big\.png is larger than 10 MB"):
        answers.dropped("big.png", LARGEST_FILE + 1, None)
    with pytest.raises(DataError, match="a folder cannot be dropped"):
        answers.dropped("folder", 4096, None)
    with pytest.raises(OptionError, match="rotation must be"):
        answers.look(to_data_url(noise((1, 8, 8))), 999.0, 1.0, 0.0, 0.0, 0.0, 1.0, False, 0)


def test_examples_are_chosen_by_their_place():
    answers = Answers(Explorer(make_subject((1, 8, 8))))
    assert answers.chosen(0) == (to_data_url(noise((1, 8, 8))), "one")
    for wrong in (-1, 1):
        with pytest.raises(DataError, match=f"no example {wrong}, only 1 of them"):
            answers.chosen(wrong)


@pytest.mark.parametrize("data", [None, {}, {"data": 5}, {"data": None}])
def test_what_a_page_would_not_send_is_refused_in_words(data):
    gr = pytest.importorskip("gradio")
    from mola.app.explore.page import sent, told_or

    event = gr.EventData(None, data)
    with pytest.raises(DataError, match=r"the page sent data = .*load it again"):
        sent(event, "data", str)
    picture, told = told_or(lambda: sent(event, "data", str))
    assert "load it again" in told
    assert picture == gr.skip()


def asked(path, **headers):
    """Status of the guarded application's answer; 200 if the request passed through to what is guarded."""
    statuses = []

    async def inner(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def note(told):
        statuses.append(told.get("status"))

    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(Guarded(inner)({"type": "http", "path": path, "headers": given}, None, note))
    return statuses[0]


def test_requests_that_write_files_or_do_not_say_how_large_they_are_go_nowhere():
    assert asked("/gradio_api/queue/join", content_length="5") == 200
    for ending in ("upload", "upload/", "deep_link", "process_recording"):
        assert asked(f"/gradio_api/{ending}") == 404
    for coding in ("chunked", "Chunked", "gzip, CHUNKED"):
        assert asked("/gradio_api/queue/join", transfer_encoding=coding) == 413
    for length in (str(LARGEST_REQUEST + 1), "-1", "many"):
        assert asked("/gradio_api/queue/join", content_length=length) == 413


def test_strangers_have_the_networks_size(shape):
    made = ood_examples(make_subject(shape).sight)
    assert [one.name for one in made] == ["noise", "checks", "a flower"]
    assert all(one.pixels.shape == shape and one.pixels.dtype == torch.uint8 for one in made)

"""Pictures for vision transformers: reading, preprocessing, and the maps of `repulsive inspect --images`."""

import json
import re
import sys

import pytest
import torch

from repulsive.cli import main
from repulsive.diagnostics.inspection import inspect_heads
from repulsive.diagnostics.loading import images
from repulsive.diagnostics.loading.images import prepare_images, read_images
from repulsive.diagnostics.loading.import_path import LoadError
from repulsive.diagnostics.loading.model import LoadedModel, load_model
from repulsive.diagnostics.loading.preprocessing import read_preprocessing
from repulsive.errors import DataError

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("numpy")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


def noise(width, height, seed=0):
    """A picture of coarse random colours."""
    values = torch.randint(256, (5, 7, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.frombytes("RGB", (7, 5), bytes(values.flatten().tolist())).resize((width, height), 3)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    noise(50, 37).save(folder / "b.png")
    noise(41, 66, 1).save(folder / "a.jpg")
    (folder / "notes.txt").write_text("no picture")
    return folder


def vit():
    return transformers.ViTModel(transformers.ViTConfig(image_size=24, patch_size=8, **SIZES)), 9, ("class",)


def dino():
    config = transformers.Dinov2WithRegistersConfig(image_size=28, patch_size=7, num_register_tokens=2, **SIZES)
    return transformers.Dinov2WithRegistersModel(config), 16, ("class", "register 0", "register 1")


def clip():
    vision = {**SIZES, "image_size": 24, "patch_size": 8}
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**vision)), 9, ("class",)


def siglip():
    config = transformers.SiglipVisionConfig(**{**SIZES, "image_size": 24, "patch_size": 8}, vision_use_head=False)
    return transformers.SiglipVisionModel(config), 9, ()


@pytest.mark.parametrize("build", [vit, dino, clip, siglip], ids=lambda build: build.__name__)
def test_maps_are_the_attention_of_the_model(tmp_path, pictures, build):
    """Oracle: `output_attentions` of the same weights with eager attention."""
    torch.manual_seed(0)
    model, patches, special = build()
    for name, parameter in model.named_parameters() if build is not siglip else ():  # its weights are large already
        if "q_proj" in name or "k_proj" in name or "query" in name or "key" in name:
            parameter.data *= 8  # attention far from uniform
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    prepared = prepare_images(loaded, read_images(pictures, 9))
    assert prepared.names == ["a.jpg", "b.png"] and prepared.layout.special == special
    assert prepared.layout.patches == patches and "the model has no preprocessor_config.json" in prepared.note
    inspection = inspect_heads(prepared.model, prepared.batches, twins=0)
    eager = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = eager(prepared.batches[0]["pixel_values"], output_attentions=True).attentions
    for item, maps in enumerate(inspection.maps):
        assert len(maps) == len(expected) == 2
        for weights, oracle in zip(maps.values(), expected, strict=True):
            assert weights.shape[-1] == patches + len(special) and float(oracle[item].std()) > 0.02
            assert torch.allclose(weights, oracle[item], atol=1e-5)


def test_the_vision_tower_of_a_clip_model(tmp_path, pictures):
    text = {**SIZES, "vocab_size": 50}
    config = transformers.CLIPConfig(text_config=text, vision_config={**SIZES, "image_size": 24, "patch_size": 8})
    transformers.CLIPModel(config).save_pretrained(tmp_path)
    prepared = prepare_images(load_model(str(tmp_path)), read_images(pictures, 9))
    assert prepared.part == "vision_model" and prepared.layout.tokens == 10
    inspection = inspect_heads(prepared.model, prepared.batches, twins=1)
    assert [heads for *_, heads in inspection.layers] == [4, 4] and len(inspection.circuits.logits[0].mean.values) == 1


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ViTImageProcessorPil", {"size": {"height": 24, "width": 24}}),
        ("ViTImageProcessorPil", {"size": {"height": 24, "width": 16}, "image_mean": [0.1, 0.2, 0.3], "resample": 3}),
        ("CLIPImageProcessorPil", {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}),
        ("BitImageProcessorPil", {"size": {"shortest_edge": 30}, "crop_size": {"height": 21, "width": 21}}),
        ("ViTImageProcessorPil", {"size": {"height": 24, "width": 24}, "do_normalize": False}),
    ],
)
def test_preprocessing_is_that_of_transformers(tmp_path, pictures, name, settings):
    if not hasattr(transformers, name):
        pytest.skip(f"this version of transformers has no {name}")
    processor = getattr(transformers, name)(**settings)
    processor.save_pretrained(tmp_path)
    steps = read_preprocessing(tmp_path, vit()[0], 3)
    for _, image in read_images(pictures, 9):
        expected = torch.as_tensor(processor(image, return_tensors="pt")["pixel_values"][0])
        ours = steps.normalise(steps.apply(image))
        assert ours.shape == expected.shape and torch.allclose(ours, expected, atol=2e-5)


def test_another_size_resizes_the_position_embeddings(tmp_path, pictures):
    model, _, _ = vit()
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": 40, "image_mean": 0.5, "image_std": 0.5}))
    prepared = prepare_images(load_model(str(tmp_path)), read_images(pictures, 1))
    assert prepared.layout.patches == 25 and prepared.batches[0]["interpolate_pos_encoding"] is True


@pytest.mark.parametrize(
    "entries",
    [
        {"size": 10**9},
        {"size": "large"},
        {"size": {"height": 24}},
        {"size": 24, "image_mean": [0.5] * 2},
        {"size": 24, "image_std": 0},
        {"size": 24, "resample": 77},
        {"size": 24, "rescale_factor": float("nan")},
        [],
    ],
)
def test_bad_preprocessing_is_refused(tmp_path, entries):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(entries))
    with pytest.raises(LoadError, match=r"cannot use .*preprocessor_config\.json"):
        read_preprocessing(tmp_path, vit()[0], 3)


def test_a_checkpoint_without_a_pooler_is_loaded(tmp_path, pictures):
    model = transformers.ViTModel(vit()[0].config, add_pooling_layer=False)
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.model.pooler is None
    prepared = prepare_images(loaded, read_images(pictures, 1))
    inspection = inspect_heads(prepared.model, prepared.batches, twins=2)
    assert len(inspection.circuits.logits[0].mean.values) == 2  # twins are built without a pooler, too


def test_transparent_rotated_and_grey_pictures(tmp_path):
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    clear.save(tmp_path / "clear.png")
    Image.new("L", (4, 4), 99).save(tmp_path / "grey.png")
    tall = Image.new("RGB", (2, 6))
    exif = tall.getexif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    tall.save(tmp_path / "turned.jpg", exif=exif)
    read = dict(read_images(tmp_path, 9))
    assert read["clear.png"].getpixel((0, 0)) == (255, 255, 255) and read["grey.png"].getpixel((0, 0)) == (99, 99, 99)
    assert read["turned.jpg"].size == (6, 2)


def test_models_that_do_not_read_pictures_are_refused(pictures):
    read = read_images(pictures, 1)
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=20, **SIZES))
    with pytest.raises(DataError, match="BertModel reads input_ids, not pictures"):
        prepare_images(LoadedModel(bert), read)
    swin = transformers.SwinModel(
        transformers.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1], num_heads=[2], window_size=4)
    )
    with pytest.raises(DataError, match="needs a ViT that attends between all patches"):
        prepare_images(LoadedModel(swin), read)


@pytest.fixture
def inspect(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*words):
        capsys.readouterr()  # progress bars of transformers
        with pytest.raises(SystemExit) as left:
            main(["inspect", *map(str, words)])
        out, err = capsys.readouterr()
        return left.value.code, out, err

    return run


def test_the_command_writes_a_page_with_pictures(inspect, tmp_path, pictures):
    dino()[0].save_pretrained(tmp_path / "model")
    code, out, _ = inspect(tmp_path / "model", "--images", pictures, "--twins", 0, "--out", "out")
    assert code == 0 and "mean cosine, attention maps" in out and "mean CKA, outputs" in out
    page = (tmp_path / "out" / "inspect.html").read_text()
    data = json.loads(re.search(r'id="picture-data">(.*?)</script>', page, re.S)[1])
    assert [image["name"] for image in data["images"]] == ["a.jpg", "b.png"] and data["special"][1] == "register 0"
    assert "img-src data:" in page and "class token, register 0, register 1" in page and "resized to 28 x 28" in page
    assert json.loads((tmp_path / "out" / "inspect.json").read_text())["items"] == 2


def test_errors_are_one_line(inspect, tmp_path, pictures, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "x.png").write_bytes((pictures / "b.png").read_bytes()[:60])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n")  # Pillow would start Ghostscript
    vit()[0].save_pretrained(tmp_path / "model")
    for words, expected in (
        (["model", "--images", "nowhere"], "no such folder or file"),
        (["model", "--images", "empty"], "no picture in this folder"),
        (["model", "--images", "broken"], "cannot read the picture"),
        (["model", "--images", "other"], "cannot read the picture"),
        (["model", "--images", pictures, "--sentence", "x"], "only one of --text"),
        (["nowhere", "--images", pictures], "no folder 'nowhere'"),
    ):
        code, out, err = inspect(*words)
        assert (code, out, err.count("\n")) == (2, "", 1) and expected in err, (words, err)
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    assert "50 x 37 pixels; make it smaller" in inspect("model", "--images", pictures / "b.png")[2]
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert "[images]'" in inspect("model", "--images", pictures)[2]


def test_a_folder_of_a_timm_model(pictures, tmp_path):
    timm = pytest.importorskip("timm", exc_type=ImportError)
    from safetensors.torch import save_file

    model = timm.create_model("vit_tiny_patch16_224", img_size=48, depth=2, num_classes=0)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    kept = {key: model.pretrained_cfg[key] for key in ("input_size", "interpolation", "crop_pct", "mean", "std")}
    sizes = {"architecture": "vit_tiny_patch16_224", "num_classes": 0, "model_args": {"img_size": 48, "depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "pretrained_cfg": kept}))
    prepared = prepare_images(load_model(str(tmp_path)), read_images(pictures, 2))
    assert prepared.part == "timm_model" and prepared.layout.patches == 9 and "timm: 48 x 48" in prepared.note
    inspection = inspect_heads(prepared.model, prepared.batches, twins=0)
    assert [heads for *_, heads in inspection.layers] == [3, 3] and len(inspection.maps) == 2


def test_a_timm_model_with_registers(pictures):
    timm = pytest.importorskip("timm", exc_type=ImportError)
    model = timm.create_model("vit_small_patch14_reg4_dinov2", img_size=42, depth=2, num_heads=4).eval()
    prepared = prepare_images(LoadedModel(model), read_images(pictures, 2))
    assert prepared.layout.special == ("class", *(f"register {index}" for index in range(4)))
    assert prepared.layout.patches == 9 and "data configuration of timm" in prepared.note
    transform = timm.data.create_transform(**timm.data.resolve_data_config({"input_size": (3, 42, 42)}, model=model))
    expected = torch.stack([transform(image) for _, image in read_images(pictures, 2)])
    assert torch.allclose(prepared.batches[0], expected, atol=1e-5)
    inspection = inspect_heads(prepared.model, prepared.batches, twins=0)
    block = model.blocks[0]
    with torch.no_grad():
        x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(expected))))
        normed = block.norm1(x)
        size = (2, x.shape[1], 3, 4, -1)
        q, k, _ = block.attn.qkv(normed).reshape(size).permute(2, 0, 3, 1, 4)
        oracle = (q.double() @ k.double().mT / q.shape[-1] ** 0.5).softmax(-1)
    assert torch.allclose(inspection.maps[1]["blocks.0.attn"].double(), oracle[1], atol=1e-5)

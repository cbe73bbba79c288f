"""Tiny architectures, built from configurations with random weights: what people bring. Nothing is downloaded."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

__all__ = ["ZOO", "Case", "Made", "build"]

WORDS, LENGTH, CLASSES, WIDTH = 40, 8, 3, 16


@dataclass
class Made:
    """A model with a batch for it."""

    model: torch.nn.Module
    x: dict[str, torch.Tensor]
    y: torch.Tensor
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    family: str
    make: Callable[[int], Made]


ZOO: list[Case] = []


def tokens(batch: int, length: int = LENGTH) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(5, WORDS, (batch, length), generator=draw)
    ids[:, 0] = 4
    mask = torch.arange(length) < torch.randint(length // 2 + 1, length + 1, (batch, 1), generator=draw)
    return {"input_ids": ids, "attention_mask": mask.long()}


def pixels(batch: int, size: int = 32) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(4))}


def classes(batch: int) -> torch.Tensor:
    return torch.arange(batch) % CLASSES


def cross_entropy(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, y, reduction="none")


def next_token(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean over the positions of each text."""
    return (
        torch.nn.functional.cross_entropy(outputs[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="none")
        .reshape(len(y), -1)
        .mean(1)
    )


def square(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    """For models without a head: all numbers of the last hidden state."""
    hidden = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    wave = torch.cos(torch.arange(hidden[0].numel(), dtype=hidden.dtype) * 1.7 + 0.3)
    return (hidden.flatten(1) * wave).sum(1) * (1 + y.to(hidden.dtype)) + 0.1 * hidden.flatten(1).square().sum(1)


def _small() -> dict[str, Any]:
    return {
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
    }


def _config(name: str, **settings: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**settings)
    config.num_labels = CLASSES
    if name == "Mixtral":  # its grouped products know no float64
        config._experts_implementation = "eager"
    return config


def _add(name: str, family: str, make: Callable[[int], Made]) -> None:
    ZOO.append(Case(name, family, make))


def _classifier(name: str, config: str | None = None, head: str = "ForSequenceClassification", **settings: Any) -> None:
    def make(batch: int) -> Made:
        settings_of = {k: v for k, v in {**_small(), **settings}.items() if v is not None}
        model = getattr(transformers, f"{name}{head}")(_config(config or name, **settings_of))
        return Made(model, tokens(batch), classes(batch), cross_entropy)

    _add(f"{name}{head}", "encoder", make)


def _decoder(name: str, head: str = "ForCausalLM", **settings: Any) -> None:
    def make(batch: int) -> Made:
        model = getattr(transformers, f"{name}{head}")(_config(name, **{**_small(), **settings}))
        x = {"input_ids": tokens(batch)["input_ids"]}
        return Made(model, x, x["input_ids"].clone(), next_token)

    _add(f"{name}{head}", "decoder", make)


def _vision(name: str, head: str = "ForImageClassification", size: int = 32, **settings: Any) -> None:
    def make(batch: int) -> Made:
        model = getattr(transformers, f"{name}{head}")(_config(name, **settings))
        return Made(model, pixels(batch, size), classes(batch), cross_entropy)

    _add(f"{name}{head}", "vision", make)


for encoder in ("Bert", "Albert", "Electra", "Roberta", "XLMRoberta", "Camembert", "RobertaPreLayerNorm", "MegatronBert", "Ernie"):
    extra = {"embedding_size": WIDTH} if encoder in ("Albert", "Electra") else {}
    _classifier(encoder, **extra)
_classifier("DistilBert", dim=WIDTH, n_layers=2, n_heads=2, hidden_dim=24)
_classifier("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=8)
_classifier("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=4, norm_rel_ebd="layer_norm")
_classifier("MPNet")
_classifier("MobileBert", embedding_size=WIDTH, intra_bottleneck_size=WIDTH, true_hidden_size=WIDTH)
_classifier("ConvBert", embedding_size=WIDTH)
_classifier("RoFormer", embedding_size=WIDTH)
_classifier("Nystromformer", num_landmarks=8, segment_means_seq_len=LENGTH)
_classifier("FNet", max_position_embeddings=LENGTH, tpu_short_seq_length=LENGTH)
_classifier("SqueezeBert", embedding_size=WIDTH, q_groups=2, k_groups=2, v_groups=2, post_attention_groups=1, intermediate_groups=2)
_classifier(
    "XLNet",
    max_position_embeddings=None,
    hidden_size=None,
    num_hidden_layers=None,
    num_attention_heads=None,
    d_model=WIDTH,
    n_layer=2,
    n_head=2,
    d_inner=24,
)
_classifier("Funnel", num_hidden_layers=None, d_model=WIDTH, n_head=2, d_head=8, d_inner=24, block_sizes=[1, 1])
_classifier("ModernBert", global_attn_every_n_layers=2, local_attention=8, cls_token_id=4, sep_token_id=3)
_decoder("GPT2", head="LMHeadModel", n_embd=WIDTH, n_layer=2, n_head=2, n_positions=32)
_decoder("GPTNeo", num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], window_size=4)
_decoder("GPTNeoX")
_decoder("GPTJ", n_embd=WIDTH, n_layer=2, n_head=2, rotary_dim=4, n_positions=32)
_decoder("OPT", ffn_dim=24, word_embed_proj_dim=WIDTH)
_decoder("Bloom", n_layer=2, n_head=2)
_decoder("Llama", num_key_value_heads=1)
_decoder("Mistral", num_key_value_heads=1, sliding_window=4)
_decoder("Mixtral", num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2)
_decoder("Qwen2", num_key_value_heads=1)
_decoder("Qwen3", num_key_value_heads=1, head_dim=8)
_decoder("Gemma", num_key_value_heads=1, head_dim=8)
_decoder("Gemma2", num_key_value_heads=1, head_dim=8, sliding_window=4)
_decoder("Phi")
_decoder("Phi3", pad_token_id=0)
_decoder("Falcon", alibi=False)
_decoder("StableLm", num_key_value_heads=1)
_decoder("Olmo", num_key_value_heads=1)
_decoder("Mamba", state_size=4)
_decoder("CTRL", head="LMHeadModel", n_embd=WIDTH, n_layer=2, n_head=2, dff=24, n_positions=32)
_decoder("OpenAIGPT", head="LMHeadModel", n_embd=WIDTH, n_layer=2, n_head=2, n_positions=32)

_VIT = {k: v for k, v in _small().items() if k not in ("vocab_size", "max_position_embeddings", "pad_token_id")}
_vision("ViT", image_size=32, patch_size=16, **_VIT)
_vision("DeiT", image_size=32, patch_size=16, **_VIT)
_vision("Beit", image_size=32, patch_size=16, use_relative_position_bias=True, use_mask_token=False, **_VIT)
_vision("Swin", image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4)
_vision("Swinv2", image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4)
_vision("ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=4)
_vision("ConvNextV2", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=4)
_vision("Dinov2", image_size=32, patch_size=16, mlp_ratio=2, **_VIT)
_vision(
    "MobileViT",
    size=64,
    image_size=64,
    hidden_sizes=[8, 12, 16],
    neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16],
    num_attention_heads=2,
    mlp_ratio=2.0,
)
_vision("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
_vision("RegNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=8)
_vision("MobileNetV2", image_size=32, depth_multiplier=0.25, finegrained_output=False)
_vision("PoolFormer", hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1])
_vision("Segformer", hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=16)


def _t5(batch: int) -> Made:
    config = _config("T5", vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    x = tokens(batch)
    labels = x["input_ids"].flip(1)
    return Made(transformers.T5ForConditionalGeneration(config), {**x, "decoder_input_ids": labels}, labels, next_token)


def _bart(batch: int) -> Made:
    config = _config(
        "Bart", vocab_size=WORDS, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    x = tokens(batch)
    labels = x["input_ids"].flip(1)
    return Made(transformers.BartForConditionalGeneration(config), {**x, "decoder_input_ids": labels}, labels, next_token)


def _whisper(batch: int) -> Made:
    config = _config(
        "Whisper", vocab_size=WORDS, d_model=WIDTH, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8, max_source_positions=8,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    labels = tokens(batch)["input_ids"]
    sound = torch.randn(batch, 8, 16, generator=torch.Generator().manual_seed(5))
    return Made(
        transformers.WhisperForConditionalGeneration(config),
        {"input_features": sound, "decoder_input_ids": labels},
        labels,
        next_token,
    )


def _wav2vec2(name: str) -> Callable[[int], Made]:
    def make(batch: int) -> Made:
        config = _config(
            name, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8),
            conv_stride=(4, 2), conv_kernel=(8, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2, classifier_proj_size=8, apply_spec_augment=False, mask_time_prob=0.0,
            feat_extract_norm="layer", do_stable_layer_norm=True,
        )  # fmt: skip
        model = getattr(transformers, f"{name}ForSequenceClassification")(config)
        return Made(
            model,
            {"input_values": torch.randn(batch, 200, generator=torch.Generator().manual_seed(6))},
            classes(batch),
            cross_entropy,
        )

    return make


def _ast(batch: int) -> Made:
    config = _config("AST", num_mel_bins=16, max_length=32, patch_size=8, frequency_stride=8, time_stride=8, **_VIT)
    x = {"input_values": torch.randn(batch, 32, 16, generator=torch.Generator().manual_seed(6))}
    return Made(transformers.ASTForAudioClassification(config), x, classes(batch), cross_entropy)


class _Pair(torch.nn.Module):
    """CLIP's two towers by their similarity for each pair (its own logits compare all texts with all images)."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        texts = self.model.text_model(input_ids=input_ids, attention_mask=attention_mask)[1]
        images = self.model.vision_model(pixel_values=pixel_values)[1]
        return torch.cat([self.model.text_projection(texts), self.model.visual_projection(images)], 1)


def _clip(batch: int) -> Made:
    text = {**_small(), "eos_token_id": 2, "bos_token_id": 1, "projection_dim": 8}
    vision = {
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
    }
    config = transformers.CLIPConfig(text_config=text, vision_config={**vision, "projection_dim": 8}, projection_dim=8)
    return Made(_Pair(transformers.CLIPModel(config)), {**tokens(batch), **pixels(batch)}, classes(batch), square)


_add("T5ForConditionalGeneration", "encoder-decoder", _t5)
_add("BartForConditionalGeneration", "encoder-decoder", _bart)
_add("WhisperForConditionalGeneration", "sound", _whisper)
_add("Wav2Vec2ForSequenceClassification", "sound", _wav2vec2("Wav2Vec2"))
_add("HubertForSequenceClassification", "sound", _wav2vec2("Hubert"))
_add("ASTForAudioClassification", "sound", _ast)
_add("CLIPModel (pairs)", "text and image", _clip)


def _peft(base: str, kind: str, **settings: Any) -> None:
    def make(batch: int) -> Made:
        import peft

        made = next(case for case in ZOO if case.name == base).make(batch)
        config = getattr(peft, kind)(**settings)
        model = peft.get_peft_model(made.model, config)
        with torch.no_grad():  # an adapter at its start has gradients of zero in one half
            for name, p in model.named_parameters():
                if p.requires_grad and not p.abs().sum() and "lora" in name:
                    p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(7)))
        return Made(model, made.x, made.y, made.loss)

    label = kind.removesuffix("Config") + (" (DoRA)" if settings.get("use_dora") else "")
    _add(f"{base} + {label}", "peft", make)


_peft("BertForSequenceClassification", "LoraConfig", r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
_peft("LlamaForCausalLM", "LoraConfig", r=2, target_modules=["q_proj", "v_proj"])
_peft("OPTForCausalLM", "LoraConfig", r=2, target_modules=["q_proj", "v_proj"], use_dora=True)
_peft("BertForSequenceClassification", "LoraConfig", r=2, target_modules=["query", "value"], use_dora=True)
_peft("LlamaForCausalLM", "IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
_peft("T5ForConditionalGeneration", "LoraConfig", r=2, target_modules=["q", "v"])
_peft("ViTForImageClassification", "LoraConfig", r=2, target_modules=["q_proj", "v_proj"])


def _timm(name: str, **settings: Any) -> None:
    def make(batch: int) -> Made:
        from timm import models

        model = getattr(models, name)(num_classes=CLASSES, **settings)
        return Made(model, {"x": pixels(batch)["pixel_values"]}, classes(batch), cross_entropy)

    _add(f"timm {name}", "timm", make)


def _without_torchvision() -> None:
    """timm imports torchvision for reading pictures; its models need none of it. Where it is missing, empty names will do."""
    import sys
    from types import ModuleType

    class Names(type):
        def __getattr__(cls, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Names(name, (torch.nn.Module,), {})

    class Empty(ModuleType):
        __path__: list[str] = []  # noqa: RUF012
        __all__: list[str] = []  # noqa: RUF012

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Names(name, (torch.nn.Module,), {})

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] == "torchvision" else None

        def create_module(self, spec: Any) -> ModuleType:
            return Empty(spec.name)

        def exec_module(self, module: ModuleType) -> None:
            pass

    sys.meta_path.append(Finder())


if importlib.util.find_spec("timm"):  # it brings torchvision, which is no dependency of the tests: used where it is installed
    if not importlib.util.find_spec("torchvision"):
        _without_torchvision()
    _patches = {"img_size": 32, "patch_size": 8, "embed_dim": 16}
    for encoder in ("VisionTransformer", "VisionTransformerDistilled", "Beit", "Eva", "Cait"):
        _timm(encoder, **_patches, depth=2, num_heads=2)
    _timm("MlpMixer", **_patches, num_blocks=2)
    _timm("SwinTransformer", img_size=32, patch_size=4, embed_dim=8, depths=(1, 1), num_heads=(2, 2), window_size=4)
    _timm("ConvNeXt", depths=(1, 1, 1, 1), dims=(8, 16, 16, 16))
    _timm("MetaFormer", depths=(1, 1), dims=(8, 16))
    _timm("EdgeNeXt", dims=(8, 16, 16, 16), depths=(1, 1, 1, 1), heads=(2, 2, 2, 2), d2_scales=(2, 2, 2, 2))


def build(case: Case, batch: int = 4) -> Made:
    """In float64, with the weights of a seed, in evaluation mode."""
    torch.manual_seed(0)
    made = case.make(batch)
    made.model.double().eval()
    made.x = {k: v.double() if v.is_floating_point() else v for k, v in made.x.items()}
    return made

"""Tiny random pipelines of diffusers, made without a network: tokenizers of a few words, widths of 32 or so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import diffusers
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

WORDS = ("a", "the", "red", "green", "small", "cat", "dog", "house", "on", "of", "photo", "painting", "blurry")
PROMPT, NEGATIVE = "a photo of a red cat on the house", "blurry painting"


def clip_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer that knows the letters, and no merges."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    ids = {token: number for number, token in enumerate(vocabulary)}
    return CLIPTokenizer(vocab=ids, merges=[], model_max_length=77)


def t5_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, which ends with </s> and pads as T5's does."""
    ids = {token: number for number, token in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokens = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=77, **tokens)


def clip(width: int = 32, *, projection: int | None = None) -> Any:
    config = CLIPTextConfig(
        vocab_size=60, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4,
        projection_dim=projection or width, bos_token_id=52, eos_token_id=53, pad_token_id=1,
    )  # fmt: skip
    return (CLIPTextModel if projection is None else CLIPTextModelWithProjection)(config)


def t5(width: int = 32) -> Any:
    config = T5Config(
        vocab_size=32, d_model=width, d_kv=8, d_ff=2 * width, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", is_encoder_decoder=False, use_cache=False,
    )  # fmt: skip
    return T5EncoderModel(config)


def unet(**settings: Any) -> Any:
    given = dict(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32, attention_head_dim=4, norm_num_groups=8,
    )  # fmt: skip
    return diffusers.UNet2DConditionModel(**{**given, **settings})


def vae(latents: int = 4, **settings: Any) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        latent_channels=latents,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        sample_size=32,
        **settings,
    )


def ddim() -> Any:
    return diffusers.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
    )


def euler() -> Any:
    return diffusers.EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")


def _sd_parts(**settings: Any) -> dict[str, Any]:
    return dict(
        unet=unet(**settings),
        vae=vae(),
        scheduler=ddim(),
        tokenizer=clip_tokenizer(),
        text_encoder=clip(),
        safety_checker=None,
        feature_extractor=None,
    )


def sd15() -> Any:
    return diffusers.StableDiffusionPipeline(**_sd_parts(), requires_safety_checker=False)


def sd2() -> Any:
    parts = _sd_parts(use_linear_projection=True, attention_head_dim=(2, 4), cross_attention_dim=48)
    parts["text_encoder"] = clip(48)
    return diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)


def inpainting() -> Any:
    return diffusers.StableDiffusionInpaintPipeline(**_sd_parts(in_channels=9), requires_safety_checker=False)


def img2img() -> Any:
    return diffusers.StableDiffusionImg2ImgPipeline(**_sd_parts(), requires_safety_checker=False)


def controlnet() -> Any:
    parts = _sd_parts()
    net = diffusers.ControlNetModel.from_unet(parts["unet"], conditioning_embedding_out_channels=(16, 32))
    for name, parameter in net.named_parameters():  # they start as zeros, which would show nothing
        if name.startswith(("controlnet_", "controlnet_cond_embedding.conv_out")):
            torch.nn.init.normal_(parameter, std=0.1)
    return diffusers.StableDiffusionControlNetPipeline(**parts, controlnet=net, requires_safety_checker=False)


def sdxl() -> Any:
    denoiser = unet(
        cross_attention_dim=80,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        transformer_layers_per_block=(1, 2),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=48 + 6 * 8,
    )
    return diffusers.StableDiffusionXLPipeline(
        unet=denoiser,
        vae=vae(),
        scheduler=euler(),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        text_encoder=clip(),
        text_encoder_2=clip(48, projection=48),
        add_watermarker=False,
    )


def sd3(**settings: Any) -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=8, out_channels=8, num_layers=3, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=80, caption_projection_dim=32, pooled_projection_dim=80,
        pos_embed_max_size=24, **settings,
    )  # fmt: skip
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        vae=vae(8, shift_factor=0.06),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        tokenizer_3=t5_tokenizer(),
        text_encoder=clip(projection=32),
        text_encoder_2=clip(48, projection=48),
        text_encoder_3=t5(80),
    )


def sd35() -> Any:
    return sd3(dual_attention_layers=(0, 1), qk_norm="rms_norm")


def flux() -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return diffusers.FluxPipeline(
        transformer=transformer,
        vae=vae(4, shift_factor=0.06),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        tokenizer=clip_tokenizer(),
        tokenizer_2=t5_tokenizer(),
        text_encoder=clip(),
        text_encoder_2=t5(),
    )


def pixart() -> Any:
    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2,
        cross_attention_dim=32, sample_size=16, patch_size=2, caption_channels=32, use_additional_conditions=False,
    )  # fmt: skip
    return diffusers.PixArtSigmaPipeline(
        transformer=transformer,
        vae=vae(),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
        tokenizer=t5_tokenizer(),
        text_encoder=t5(),
    )


PIPELINES: dict[str, Callable[[], Any]] = {
    "sd15": sd15, "sd2": sd2, "sdxl": sdxl, "sd3": sd3, "sd35": sd35, "flux": flux, "pixart": pixart,
    "inpainting": inpainting, "controlnet": controlnet,
}  # fmt: skip


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The pipeline `name` with random weights from a fixed seed, in `dtype`, without progress bars."""
    torch.manual_seed(0)
    pipe = PIPELINES[name]() if name in PIPELINES else globals()[name]()
    for model in pipe.components.values():
        if isinstance(model, torch.nn.Module):
            model.eval()  # as from_pretrained does
    if dtype != torch.float32:
        pipe = pipe.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def saved_and_loaded(pipe: Any) -> Any:
    """The pipeline as diffusers reads it back from its own files."""
    with TemporaryDirectory() as folder:
        pipe.save_pretrained(folder)
        return type(pipe).from_pretrained(Path(folder))


def inputs(name: str, size: int = 32, rows: int = 1, **more: Any) -> dict[str, Any]:
    """Arguments of a call of the pipeline `name`: two steps, for images of about `size` pixels that are not square."""
    height, width = size, size + 8
    image = torch.rand((rows, 3, height, width), generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = dict(
        prompt=[PROMPT] * rows,
        num_inference_steps=2,
        height=height,
        width=width,
        output_type="pt",
        generator=torch.Generator().manual_seed(2),
    )
    if name not in ("flux",):
        given["negative_prompt"] = [NEGATIVE] * rows
    if name == "inpainting":
        given |= dict(image=image, mask_image=(image[:, :1] > 0.5).float())
    if name == "controlnet":
        given["image"] = image
    if name in ("sd3", "sd35", "flux", "pixart"):
        given["max_sequence_length"] = 16
    if name == "pixart":
        given |= dict(use_resolution_binning=False, clean_caption=False)
    if name == "img2img":
        del given["height"], given["width"]
        given |= dict(image=image, strength=0.9)
    return given | more


def images(pipe: Any, name: str, **settings: Any) -> torch.Tensor:
    """The images of one call [rows, 3, height, width], of values from 0 to 1."""
    with torch.no_grad():
        return pipe(**inputs(name, **settings)).images.float()

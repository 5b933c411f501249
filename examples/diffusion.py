"""A picture by a pipeline of diffusers, before and after injection: the same picture, and the time of each.

python examples/diffusion.py [FOLDER] [--prompt "a photo of a cat"] [--quant int8:a8] [--out picture.png]

FOLDER (or a name that diffusers knows) is any text-to-image pipeline; without one, a small pipeline with random weights
makes a picture of noise, and needs no network.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import infuse

PROMPT = "a photo of a red cat on a house"


def small_pipeline() -> Any:
    """Stable Diffusion with four layers and random weights, and a tokenizer of single letters."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    text = CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=len(tokens) - 2,
        eos_token_id=len(tokens) - 1,
        pad_token_id=len(tokens) - 1,
    )
    unet = diffusers.UNet2DConditionModel(
        sample_size=32,
        layers_per_block=1,
        block_out_channels=(64, 128),
        cross_attention_dim=64,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        latent_channels=4,
        up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=64,
    )
    scheduler = diffusers.DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1)
    pipe = diffusers.StableDiffusionPipeline(
        unet=unet.eval(),
        vae=vae.eval(),
        scheduler=scheduler,
        text_encoder=CLIPTextModel(text).eval(),
        tokenizer=CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=77),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(pipe: Any, prompt: str, steps: int) -> tuple[Any, float]:
    """A picture from a fixed seed, and the seconds that it took."""
    start = time.perf_counter()
    images = pipe(prompt, num_inference_steps=steps, generator=torch.Generator().manual_seed(1)).images
    return images[0], time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", help="a pipeline of diffusers; none: a small one with random weights")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--quant", help="a format for the weights, such as int8:a8")
    parser.add_argument("--out", type=Path, default=Path("picture.png"))
    args = parser.parse_args()
    if args.folder:
        from diffusers import AutoPipelineForText2Image

        pipe = AutoPipelineForText2Image.from_pretrained(args.folder, torch_dtype=torch.bfloat16)
    else:
        pipe = small_pipeline().to(torch.bfloat16)
    _, before_s = picture(pipe, args.prompt, args.steps)
    given = {"quant": args.quant} if args.quant else {}
    engine = infuse.init_inference(pipe, dtype=torch.bfloat16, **given)
    image, after_s = picture(engine, args.prompt, args.steps)
    image.save(args.out)
    print(engine.report())
    print(f"{args.steps} steps: {before_s:.2f} s before, {after_s:.2f} s after; the picture is {args.out}")


if __name__ == "__main__":
    main()

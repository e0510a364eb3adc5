"""The attributes of Trainer and Accelerator that we use and every supported release has: rows of `seams`, for mypy.

Attributes that some releases lack are read by ``getattr`` with a default.
"""

from __future__ import annotations

from typing import Any, Protocol


class ArgumentsLike(Protocol):
    """``transformers.TrainingArguments``."""

    @property
    def world_size(self) -> int: ...
    @property
    def process_index(self) -> int: ...
    @property
    def n_gpu(self) -> int: ...
    @property
    def device(self) -> Any: ...

    gradient_accumulation_steps: int
    per_device_train_batch_size: int
    per_device_eval_batch_size: int
    disable_tqdm: Any
    accelerator_config: Any
    max_steps: int
    num_train_epochs: float
    length_column_name: str


class StateLike(Protocol):
    """``transformers.TrainerState``."""

    global_step: int


class AcceleratorLike(Protocol):
    """``accelerate.Accelerator``."""

    scaler: Any

    @property
    def device(self) -> Any: ...

    distributed_type: Any
    mixed_precision: str
    gradient_accumulation_steps: int
    sync_gradients: bool

    @property
    def state(self) -> Any: ...

    gradient_state: Any
    ddp_handler: Any
    deepspeed_engine_wrapped: Any

    def backward(self, *args: Any, **kwargs: Any) -> Any: ...
    def reduce(self, *args: Any, **kwargs: Any) -> Any: ...
    def no_sync(self, *args: Any, **kwargs: Any) -> Any: ...
    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Any: ...
    def autocast(self, *args: Any, **kwargs: Any) -> Any: ...
    def unwrap_model(self, *args: Any, **kwargs: Any) -> Any: ...


class TrainerLike(Protocol):
    """``transformers.Trainer``."""

    @property
    def args(self) -> ArgumentsLike: ...
    @property
    def state(self) -> StateLike: ...
    @property
    def accelerator(self) -> AcceleratorLike: ...

    model: Any
    model_wrapped: Any
    optimizer: Any
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    label_smoother: Any
    is_in_train: bool
    callback_handler: Any
    control: Any
    _train_batch_size: int

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any: ...
    def compute_loss_context_manager(self, *args: Any, **kwargs: Any) -> Any: ...
    def create_accelerator_and_postprocess(self, *args: Any, **kwargs: Any) -> Any: ...
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any: ...
    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any: ...
    def log(self, *args: Any, **kwargs: Any) -> Any: ...
    def prediction_step(self, *args: Any, **kwargs: Any) -> Any: ...
    def training_step(self, *args: Any, **kwargs: Any) -> Any: ...
    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any: ...

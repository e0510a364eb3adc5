"""The promise for a training loop written by hand, with accelerate, with DistributedDataParallel, or on one process.

    windows = accumulation_windows(dataloader, accelerator)     # without accelerate: steps=G
    for epoch in range(epochs):
        for window in windows:
            for batch in window:
                with window.micro_batch(model):
                    loss = window.loss(model, batch)            # a loss of your own: window.scale(loss, batch)
                    accelerator.backward(loss)                  # without accelerate: loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(window.mean_loss())

A window is fetched whole and counted over all ranks by one collective, before its first loss; the short one at the end
of an epoch is a window like any other. How the model reduces its loss is observed in the first window, as under the
Trainer. Nothing waits for the device until a number is read.
"""

from hf_accum_fix.loop.windows import AccumulationWindow, AccumulationWindows, accumulation_windows

__all__ = ["AccumulationWindow", "AccumulationWindows", "accumulation_windows"]

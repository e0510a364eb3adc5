"""Where `Dealer` was imported from before it had a room; take it from `hf_accum_fix`."""

from __future__ import annotations

from hf_accum_fix.data.balancing import Dealer as Dealer

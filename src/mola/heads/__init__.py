"""Find and check the last linear layer of any network, by watching one forward pass."""

from mola.heads.explaining import check_logits
from mola.heads.finding import find_head, first_pass
from mola.heads.layer import Head, LayerCall, head_by_name
from mola.heads.positions import Carried

__all__ = ["Carried", "Head", "LayerCall", "check_logits", "find_head", "first_pass", "head_by_name"]

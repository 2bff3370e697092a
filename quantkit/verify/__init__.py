"""A written checkpoint, read back by readers that quantkit did not write."""

from quantkit.verify.checkpoint import LOGIT_TOLERANCE, VerifyReport, verify_checkpoint

__all__ = ["LOGIT_TOLERANCE", "VerifyReport", "verify_checkpoint"]

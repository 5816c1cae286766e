"""The commands of `python -m ejkernel_ops`, one module for each group. Nothing else imports them."""

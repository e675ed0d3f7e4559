"""`python -m hookline.cli` is the command `hookline`."""

from hookline.cli import main

raise SystemExit(main())

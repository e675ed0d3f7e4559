"""`python -m hookline` is the command `hookline`."""

from hookline.cli import main

raise SystemExit(main())

import sys

from liger_kernel.cli import main

sys.exit(main())

from experiments.nano.data.build import main

raise SystemExit(main())

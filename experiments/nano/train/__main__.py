from experiments.nano.train.stages import main

raise SystemExit(main())

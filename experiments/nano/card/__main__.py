from experiments.nano.card import main

raise SystemExit(main())

// Command servers starts what tests need, runs a command with it, and takes it down again, also when the command
// fails or is interrupted:
//
//	servers [-rabbitmq] [-redis] [-kafka] command [argument …]
//
// The command gets SHOVE_TEST_RABBITMQ_URL and SHOVE_TEST_RABBITMQ_MANAGEMENT_URL, and SHOVE_TEST_REDIS_URL. Where they
// are set already nothing is started. A server that is missing on the machine is said and left out: the tests decide what that means.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/shove-dev/shove/internal/testenv"
	"github.com/shove-dev/shove/internal/testenv/kafkaserver"
	"github.com/shove-dev/shove/internal/testenv/rabbitserver"
	"github.com/shove-dev/shove/internal/testenv/redisserver"
)

func main() {
	rabbitmq := flag.Bool("rabbitmq", false, "start a RabbitMQ server")
	redis := flag.Bool("redis", false, "start a Redis server")
	kafka := flag.Bool("kafka", false, "start a Kafka broker")
	flag.Parse()
	if flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "usage: servers [-rabbitmq] [-redis] [-kafka] command [argument …]")
		os.Exit(2)
	}
	code, err := run(*rabbitmq, *redis, *kafka, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "servers:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

func run(rabbitmq, redis, kafka bool, command []string) (code int, err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	env := os.Environ()
	if rabbitmq && os.Getenv(testenv.RabbitMQURLVar) == "" {
		server, startErr := startRabbitMQ(ctx)
		switch {
		case errors.Is(startErr, rabbitserver.ErrNotAvailable):
			fmt.Fprintln(os.Stderr, "servers:", startErr)
		case startErr != nil:
			return 1, startErr
		default:
			defer func() { err = errors.Join(err, server.Close()) }()
			env = append(env, testenv.RabbitMQURLVar+"="+server.URL(), testenv.RabbitMQManagementURLVar+"="+server.ManagementURL())
		}
	}
	if redis && os.Getenv(testenv.RedisURLVar) == "" {
		server, startErr := startRedis(ctx)
		switch {
		case errors.Is(startErr, redisserver.ErrNotAvailable):
			fmt.Fprintln(os.Stderr, "servers:", startErr)
		case startErr != nil:
			return 1, startErr
		default:
			defer func() { err = errors.Join(err, server.Close()) }()
			env = append(env, testenv.RedisURLVar+"="+server.URL())
		}
	}
	if kafka && os.Getenv(testenv.KafkaServersVar) == "" {
		server, startErr := startKafka(ctx)
		switch {
		case errors.Is(startErr, kafkaserver.ErrNotAvailable):
			fmt.Fprintln(os.Stderr, "servers:", startErr)
		case startErr != nil:
			return 1, startErr
		default:
			defer func() { err = errors.Join(err, server.Close()) }()
			env = append(env, testenv.KafkaServersVar+"="+server.Addr(kafkaserver.Plain))
		}
	}
	return runCommand(ctx, command, env)
}

func startKafka(ctx context.Context) (*kafkaserver.Server, error) {
	started := time.Now()
	server, err := kafkaserver.Start(ctx, kafkaserver.Options{JVM: []string{kafkaserver.LongLived}})
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(os.Stderr, "servers: Kafka listens on %s (started in %v)\n", server.Addr(kafkaserver.Plain), time.Since(started).Round(100*time.Millisecond))
	return server, nil
}

func startRabbitMQ(ctx context.Context) (*rabbitserver.Server, error) {
	started := time.Now()
	server, err := rabbitserver.Start(ctx, rabbitserver.Options{})
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(os.Stderr, "servers: RabbitMQ listens on %s (started in %v)\n", server.Addr(), time.Since(started).Round(100*time.Millisecond))
	return server, nil
}

// startRedis starts a server that writes its append-only file as most do.
func startRedis(ctx context.Context) (*redisserver.Server, error) {
	server, err := redisserver.Start(ctx, redisserver.Options{Config: []string{"appendfsync everysec"}})
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(os.Stderr, "servers: Redis listens on %s\n", server.Addr())
	return server, nil
}

// runCommand returns the command's exit code. On an interrupt the command gets one too, and ten seconds to end.
func runCommand(ctx context.Context, command, env []string) (int, error) {
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Env = env
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return 130, errors.New("interrupted")
	case errors.As(err, &exit):
		return max(exit.ExitCode(), 1), nil
	case err != nil:
		return 1, fmt.Errorf("running %q: %w", command[0], err)
	}
	return 0, nil
}
